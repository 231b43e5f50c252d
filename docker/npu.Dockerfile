# docker build -f docker/npu.Dockerfile --build-arg CANN=<image of CANN with Python 3.11> -t runtime:npu .
# docker run --rm --network host --device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm \
#     --device /dev/hisi_hdc -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro \
#     -v /models:/models:ro runtime:npu --model-path /models/NAME
ARG CANN
FROM ${CANN}
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 \
    && pip install --no-cache-dir torch_npu==2.13.0
COPY pyproject.toml setup.py README.md LICENSE /src/
COPY runtime /src/runtime
RUN pip install --no-cache-dir "/src[ascend,regex,grpc,kv-events]" && rm -r /src
EXPOSE 30000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --start-period=20m CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:30000/health', timeout=5)"]
# a login shell, for CANN's environment (LD_LIBRARY_PATH and others) is set by its profile
ENTRYPOINT ["/bin/bash", "-lc", "exec runtime serve --device npu --host 0.0.0.0 --port 30000 \"$@\"", "runtime"]
