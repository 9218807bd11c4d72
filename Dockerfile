# Two images with the same base. The light one has no PyTorch: it prepares, plans, launches and serves
# MLflow. The full one does everything.
#   docker build -t ddpm-light:dev --target light .
#   docker build -t ddpm:dev .
#   docker build -t ddpm:cpu --build-arg TORCH=cpu .                # PyTorch without CUDA
#   docker build -t ddpm:train --build-arg EXTRAS=s3,tracking .     # without kfp, dvc and metrics

# Lists of requirements alone: other changes of pyproject.toml do not install all again.
FROM python:3.11-slim AS requirements
ARG EXTRAS=s3,parquet,tracking,eval,dvc,pipeline
WORKDIR /build
COPY pyproject.toml .
RUN mkdir /opt/ddpm \
    && python3 -c "import tomllib; \
    project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    extras = [project['optional-dependencies'][name] for name in '$EXTRAS'.split(',') if name]; \
    print(*project['dependencies'], *sum(extras, []), sep='\n')" > /opt/ddpm/requirements.txt
# The light image leaves these out. MLflow requires the last one, but only to log figures.
RUN printf '%s\n' torch torchvision torch-fidelity matplotlib > /opt/ddpm/not-light.txt
COPY requirements.lock scripts/install-locked /opt/ddpm/

# Building our own code requires none of the libraries: a change of it rebuilds only this stage.
FROM python:3.11-slim AS code
WORKDIR /build
COPY . .
RUN scripts/install-locked requirements.lock --prefix /code --no-deps \
    --build-constraint requirements.lock .

FROM python:3.11-slim AS libraries
# git fetches DVC data sets from a repository.
RUN apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qqy --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/* \
    && pip uninstall -qqy pip setuptools wheel --root-user-action ignore
COPY --from=requirements /opt/ddpm /opt/ddpm
RUN /opt/ddpm/install-locked /opt/ddpm/requirements.lock -r /opt/ddpm/requirements.txt \
    --excludes /opt/ddpm/not-light.txt
# Only /tmp and /dev/shm must be writable: the home directory and caches are there.
ENV HOME=/tmp USER=ddpm PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 MPLCONFIGDIR=/tmp/matplotlib \
    XDG_CACHE_HOME=/tmp/cache MLFLOW_DISABLE_TELEMETRY=true DVC_NO_ANALYTICS=true
WORKDIR /tmp
ENTRYPOINT ["ddpm"]
CMD ["--help"]
ARG VERSION=dev
LABEL org.opencontainers.image.title="ddpm" \
      org.opencontainers.image.description="From a folder of images to a registered, served diffusion model" \
      org.opencontainers.image.version="$VERSION"

FROM libraries AS light
COPY --from=code /code /usr/local
ARG REVISION=unknown
LABEL org.opencontainers.image.revision="$REVISION"
USER 1000:1000

# The last stage is the default. What comes before it builds the light image alone.
FROM libraries AS full
# cuda or cpu. PyPI has no PyTorch without CUDA for Linux, so cpu takes it from PyTorch's own index, or
# from the one in TORCH_INDEX.
ARG TORCH=cuda TORCH_INDEX=
# gcc is required to compile networks for a GPU.
RUN apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qqy --no-install-recommends \
    gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/*
RUN /opt/ddpm/install-locked /opt/ddpm/requirements.lock -r /opt/ddpm/requirements.txt
# GKE mounts the GPU driver in this folder, which is not in the default path. The container toolkit
# mounts what CUDA needs of the driver, and nvidia-smi; the device plugin selects the GPUs.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=code /code /usr/local
ARG REVISION=unknown
LABEL org.opencontainers.image.revision="$REVISION"
USER 1000:1000
