# docker build -f docker/cuda.Dockerfile -t runtime:cuda .
# docker run --rm --gpus all --ipc=host -p 30000:30000 -v /models:/models:ro runtime:cuda --model-path /models/NAME
FROM python:3.12-slim
# Triton compiles a launcher with the C compiler when it is first used; torch's wheels bring CUDA itself
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir torch==2.13.0
COPY pyproject.toml setup.py README.md LICENSE /src/
COPY runtime /src/runtime
RUN pip install --no-cache-dir "/src[cuda,regex,grpc,kv-events]" && rm -r /src && useradd --uid 10001 --create-home runtime
USER runtime
EXPOSE 30000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --start-period=20m CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:30000/health', timeout=5)"]
ENTRYPOINT ["runtime", "serve", "--host", "0.0.0.0", "--port", "30000"]
