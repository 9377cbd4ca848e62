# A server of artifacts: docker run -p 8080:8080 -p 8081:8081 -v "$PWD:/models:ro" IMAGE /models/model.hyb
# The NVIDIA driver comes from the host (--gpus all). Artifacts are compiled elsewhere, by the same version of hybridc.
FROM python:3.12-slim

COPY . /source
RUN pip install --no-cache-dir "/source[serve]" && rm -r /source

RUN useradd --create-home server
USER server

EXPOSE 8080 8081
STOPSIGNAL SIGTERM
HEALTHCHECK CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/v2/health/ready')"]

# no shell in between: the server is the process that gets SIGTERM
ENTRYPOINT ["hybridc", "serve", "--host", "0.0.0.0"]
