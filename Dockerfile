# The gateway alone: Kafka is elsewhere (TRIVIUM_KAFKA__BOOTSTRAP_SERVERS), no Spark and no Java inside.
#   docker build -t trivium .
#   docker build -t trivium --build-arg EXTRAS=otel,msk --build-arg BASE=python:3.11-slim@sha256:... .
#   docker run -p 1883:1883 -e TRIVIUM_KAFKA__BOOTSTRAP_SERVERS=kafka:9092 -v ./trivium.toml:/etc/trivium/trivium.toml trivium
# The listeners are open to other machines, so the configuration must say how clients authenticate. Other arguments take the
# place of these addresses: `trivium up --config /etc/trivium/trivium.toml`, with the addresses in the file (deploy/helm).

ARG BASE=python:3.11-slim

FROM ${BASE} AS build
# python-qpid-proton and Trivium's own extensions are built from source.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY requirements/bootstrap.txt requirements/gateway.txt requirements/dev.txt requirements/
RUN python -m venv /opt/trivium \
    && python -m pip install --require-hashes -r requirements/bootstrap.txt \
    && VIRTUAL_ENV=/opt/trivium uv pip sync --require-hashes \
        --compile-bytecode --build-constraints requirements/dev.txt requirements/gateway.txt
COPY pyproject.toml setup.py README.md LICENSE ./
COPY flowcontrol flowcontrol
COPY telemetry telemetry
COPY kafka_records kafka_records
COPY gateway gateway
COPY mapping mapping
COPY protocols protocols
COPY spark_sinks spark_sinks
# Extras by name, such as otel,msk; their packages have the versions that the tests run with.
ARG EXTRAS=
RUN VIRTUAL_ENV=/opt/trivium uv pip install --compile-bytecode --build-constraints requirements/dev.txt \
        --constraints requirements/dev.txt ".${EXTRAS:+[$EXTRAS]}"

FROM ${BASE}
RUN groupadd --system --gid 10001 trivium \
    && useradd --system --uid 10001 --gid 10001 --home-dir /var/lib/trivium --create-home trivium
COPY --from=build /opt/trivium /opt/trivium
# Only /var/lib/trivium is written to: the rest of the image may be read-only.
ENV PATH=/opt/trivium/bin:$PATH \
    TRIVIUM_DATA_DIR=/var/lib/trivium
# A number, so that Kubernetes sees that it is not root.
USER 10001:10001
WORKDIR /etc/trivium
VOLUME /var/lib/trivium
EXPOSE 1883 5672 8080 8081
# Alive, not ready: a Kafka that is away for a while is no reason to restart the gateway.
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8081/healthy', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["trivium"]
CMD ["up", "--mqtt", "0.0.0.0:1883", "--amqp", "0.0.0.0:5672", "--http", "0.0.0.0:8080", "--management", "0.0.0.0:8081"]
