# The gateway alone: Kafka is elsewhere (TRIVIUM_KAFKA__BOOTSTRAP_SERVERS), no Spark and no Java inside.
#   docker build -t trivium .
#   docker run -p 1883:1883 -e TRIVIUM_KAFKA__BOOTSTRAP_SERVERS=kafka:9092 -v ./trivium.toml:/etc/trivium.toml trivium \
#       up --config /etc/trivium.toml
# The listeners are open to other machines, so the configuration must say how clients authenticate.

FROM python:3.11-slim AS build
# python-qpid-proton and Trivium's own extensions are built from source.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY requirements/bootstrap.txt requirements/gateway.txt requirements/dev.txt requirements/
RUN python -m venv /opt/trivium \
    && python -m pip install --require-hashes -r requirements/bootstrap.txt \
    && VIRTUAL_ENV=/opt/trivium uv pip sync --require-hashes \
        --build-constraints requirements/dev.txt requirements/gateway.txt
COPY pyproject.toml setup.py README.md LICENSE ./
COPY flowcontrol flowcontrol
COPY gateway gateway
COPY mapping mapping
COPY protocols protocols
COPY spark_sinks spark_sinks
RUN VIRTUAL_ENV=/opt/trivium uv pip install --no-deps --build-constraints requirements/dev.txt .

FROM python:3.11-slim
RUN useradd --system --uid 10001 --home-dir /var/lib/trivium --create-home trivium
COPY --from=build /opt/trivium /opt/trivium
ENV PATH=/opt/trivium/bin:$PATH \
    TRIVIUM_DATA_DIR=/var/lib/trivium \
    TRIVIUM_MQTT__ADDRESS=0.0.0.0:1883 \
    TRIVIUM_AMQP__ADDRESS=0.0.0.0:5672 \
    TRIVIUM_HTTP__ADDRESS=0.0.0.0:8080 \
    TRIVIUM_MANAGEMENT__ADDRESS=127.0.0.1:8081
USER trivium
WORKDIR /var/lib/trivium
EXPOSE 1883 5672 8080
# Alive, not ready: a Kafka that is away for a while is no reason to restart the gateway.
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8081/healthy', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["trivium"]
CMD ["up"]
