# fastjax for NVIDIA GPUs. The wheels bring CUDA and cuDNN; the host has the driver (580 or newer for CUDA 13) and NVIDIA's
# container toolkit:
#
#   docker build -t fastjax .
#   docker run --rm --gpus all -v "$PWD":/models fastjax train --config my.yaml
#   docker run --rm --gpus all -v "$PWD":/models -p 8000:8000 -e FASTJAX_API_KEY \
#     fastjax serve --model runs/my/model --host 0.0.0.0
FROM python:3.12-slim-trixie

ENV PYTHONUNBUFFERED=1 \
    HF_HOME=/models/.cache/huggingface \
    XDG_CACHE_HOME=/models/.cache

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY convert convert
COPY fastjax fastjax
COPY pallas_kernels pallas_kernels
# hadolint ignore=DL3013  # the project itself, whose versions are in pyproject.toml
RUN pip install --no-cache-dir ".[cuda,gguf,serve,tracking]" \
    && rm -rf /src/* \
    && useradd --create-home --uid 1000 fastjax \
    && install -d -o fastjax /models

USER 1000
WORKDIR /models
ENTRYPOINT ["fastjax"]
CMD ["--help"]
