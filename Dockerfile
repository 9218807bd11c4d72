# One image for everything: jobs, workers, KFP components, MLflow and the champion.
#   docker build -t ddpm:dev .
#   docker build -t ddpm:train --build-arg EXTRAS=s3,tracking .     # slim: without kfp, dvc and metrics

FROM python:3.11-slim AS tools
# Install uv as locked, with its hashes. It trusts the same certificates as pip.
ENV PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 UV_SYSTEM_CERTS=1
WORKDIR /build
COPY requirements.lock .
RUN awk '/^uv==/ {on=1} on {print} on && !/\\$/ {exit}' requirements.lock > uv.lock \
    && python3 -m venv /opt/uv \
    && /opt/uv/bin/pip install --quiet --require-hashes --only-binary :all: -r uv.lock

# A list of the requirements alone: other changes of pyproject.toml do not install all again.
FROM tools AS requirements
ARG EXTRAS=s3,tracking,eval,dvc,pipeline
COPY pyproject.toml .
RUN python3 -c "import tomllib; \
    project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    extras = [project['optional-dependencies'][name] for name in '$EXTRAS'.split(',') if name]; \
    print(*project['dependencies'], *sum(extras, []), sep='\n')" > requirements.txt

# Building our own code requires none of the libraries: a change of it rebuilds only this stage.
FROM tools AS code
COPY . .
RUN /opt/uv/bin/uv pip install --quiet --system --prefix /code --no-deps --compile-bytecode \
    --build-constraint requirements.lock .

FROM python:3.11-slim
# git fetches DVC data sets from a repository. gcc is required to compile networks for a GPU.
RUN apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qqy --no-install-recommends \
    gcc git libc6-dev \
    && rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/* \
    && pip uninstall -qqy pip setuptools wheel --root-user-action ignore \
    && rm -rf /root/.cache
# These are copied into the image, because podman cannot mount a cached stage.
COPY --from=tools /opt/uv/bin/uv /opt/ddpm/
COPY --from=requirements /build/requirements.txt /build/requirements.lock /opt/ddpm/
# The lock also contains development tools, so it only constrains versions here. Bytecode is compiled
# now, because the root file system of a pod is read-only.
RUN UV_NO_CACHE=1 UV_SYSTEM_CERTS=1 /opt/ddpm/uv pip install --quiet --system --compile-bytecode \
    --constraint /opt/ddpm/requirements.lock -r /opt/ddpm/requirements.txt
# Only /tmp and /dev/shm must be writable: the home directory and caches are there.
ENV HOME=/tmp USER=ddpm PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 MPLCONFIGDIR=/tmp/matplotlib \
    XDG_CACHE_HOME=/tmp/cache MLFLOW_DISABLE_TELEMETRY=true DVC_NO_ANALYTICS=true
# GKE mounts the GPU driver in this folder, which is not in the default path. The container toolkit
# mounts what CUDA needs of the driver, and nvidia-smi; the device plugin selects the GPUs.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /tmp
USER 1000:1000
ENTRYPOINT ["ddpm"]
CMD ["--help"]
COPY --from=code /code /usr/local
ARG VERSION=dev REVISION=unknown
LABEL org.opencontainers.image.title="ddpm" \
      org.opencontainers.image.description="From a folder of images to a registered, served diffusion model" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
