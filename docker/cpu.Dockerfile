# docker build -f docker/cpu.Dockerfile -t runtime:cpu .
# docker run --rm -p 30000:30000 -v /models:/models:ro runtime:cpu --model-path /models/NAME
FROM python:3.12-slim
# torch's CPU build: the plain package brings gigabytes for NVIDIA cards
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch==2.13.0
COPY pyproject.toml setup.py README.md LICENSE /src/
COPY runtime /src/runtime
RUN pip install --no-cache-dir "/src[regex,grpc,kv-events]" && rm -r /src && useradd --uid 10001 --create-home runtime
USER runtime
EXPOSE 30000
STOPSIGNAL SIGTERM
# `loading` is unhealthy too: the start period is for the largest models
HEALTHCHECK --interval=10s --start-period=10m CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:30000/health', timeout=5)"]
ENTRYPOINT ["runtime", "serve", "--host", "0.0.0.0", "--port", "30000"]
