# One image for every part of the pipeline: jobs, workers, KFP components, MLflow, the champion.
#   docker build -t ddpm:dev .
#   docker build -t ddpm:train --build-arg EXTRAS=s3,tracking .     # slim: no kfp, no dvc, no scores

FROM python:3.11-slim AS tools
# uv comes from the lock, with its hashes, and trusts the certificates that pip trusts here.
ENV PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 UV_SYSTEM_CERTS=1
WORKDIR /build
COPY requirements.lock .
RUN awk '/^uv==/ {on=1} on {print} on && !/\\$/ {exit}' requirements.lock > uv.lock \
    && python3 -m venv /opt/uv \
    && /opt/uv/bin/pip install --quiet --require-hashes --only-binary :all: -r uv.lock

# What is wanted, apart from the rest of pyproject.toml: only a change of it installs all anew.
FROM tools AS wanted
ARG EXTRAS=s3,tracking,eval,dvc,pipeline
COPY pyproject.toml .
RUN python3 -c "import tomllib; \
    project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    extras = [project['optional-dependencies'][name] for name in '$EXTRAS'.split(',') if name]; \
    print(*project['dependencies'], *sum(extras, []), sep='\n')" > wanted.txt

# Our own code needs none of the libraries to be built: a change of it builds this stage alone.
FROM tools AS code
COPY . .
RUN /opt/uv/bin/uv pip install --quiet --system --prefix /code --no-deps --compile-bytecode \
    --build-constraint requirements.lock .

FROM python:3.11-slim
# git: a DVC data set is fetched from a repository. gcc: what compiles networks for a GPU needs one.
RUN apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qqy --no-install-recommends \
    gcc git libc6-dev \
    && rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/* \
    && pip uninstall -qqy pip setuptools wheel --root-user-action ignore \
    && rm -rf /root/.cache
# Copied, and so part of the image: podman can't mount a stage that it has in its cache.
COPY --from=tools /opt/uv/bin/uv /opt/ddpm/
COPY --from=wanted /build/wanted.txt /build/requirements.lock /opt/ddpm/
# The lock names what development needs too: here it only says which version, with which hash.
# Compiled here, since the root file system of a pod is read-only.
RUN UV_NO_CACHE=1 UV_SYSTEM_CERTS=1 /opt/ddpm/uv pip install --quiet --system --compile-bytecode \
    --constraint /opt/ddpm/requirements.lock -r /opt/ddpm/wanted.txt
# Only /tmp and /dev/shm need to be writable: caches and the home lie there.
ENV HOME=/tmp USER=ddpm PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 MPLCONFIGDIR=/tmp/matplotlib \
    XDG_CACHE_HOME=/tmp/cache MLFLOW_DISABLE_TELEMETRY=true DVC_NO_ANALYTICS=true
# GKE mounts the driver of its GPUs in this folder, where nothing looks by itself. The container
# toolkit gives what CUDA needs of the driver, and nvidia-smi; the device plugin says which GPUs.
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
