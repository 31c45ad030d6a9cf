# Trains on a CPU as it is: `docker build -t dpo . && docker run dpo train --help`. A GPU wants NVIDIA's base image,
# torch for its CUDA, and the container toolkit on the host (torch's wheels bring CUDA's libraries along):
#     docker build -t dpo --build-arg BASE=nvidia/cuda:13.0.1-base-ubuntu24.04 \
#         --build-arg TORCH=https://download.pytorch.org/whl/cu130 .
#     docker run --gpus all --shm-size 8g --user "$(id -u)" -v "$PWD:/work" dpo train loss=dpo loss.beta=0.1 ...
# gcc and Python's headers are for Triton, which compiles kernels with compile=true.
ARG BASE=ubuntu:24.04
FROM ${BASE}
ARG TORCH=https://download.pytorch.org/whl/cpu
ARG EXTRAS=lora,report,wandb,tensorboard

# versions are those of the base image
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc git libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/dpo/bin:$PATH PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
RUN python3 -m venv /opt/dpo

# first the dependencies, which change less often than the code
COPY requirements.lock pyproject.toml README.md LICENSE /source/
COPY dpo/__init__.py /source/dpo/__init__.py
WORKDIR /source
RUN pip install --extra-index-url "${TORCH}" --constraint requirements.lock ".[${EXTRAS}]"
COPY dpo /source/dpo
RUN pip install --no-deps --force-reinstall .

# any user may run it, as with --user "$(id -u)", so that files in /work belong to whoever started it
ENV HOME=/tmp USER=trainer
RUN mkdir --mode=777 /work
USER 10001
WORKDIR /work
ENTRYPOINT ["dpo"]
CMD ["doctor"]
