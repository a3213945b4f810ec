"""The settings that every aiokafka client is made with, from the configuration."""

from __future__ import annotations

import ssl
from typing import Any

from aiokafka.helpers import create_ssl_context

from gateway.config import ConfigError, KafkaConfig


def client_settings(config: KafkaConfig, role: str = "") -> dict[str, Any]:
    """Keyword arguments that producers, consumers and the admin client have in common.

    `role` is appended to the client id, so that the broker's log and quotas tell our clients apart.

    Raises:
        ConfigError: no bootstrap servers, no SASL credentials, or a CA file that cannot be read.
    """
    if config.bootstrap_servers is None:
        raise ConfigError("kafka.bootstrap_servers is not known yet")
    settings: dict[str, Any] = {
        "bootstrap_servers": [server.strip() for server in config.bootstrap_servers.split(",")],
        "client_id": f"{config.client_id}-{role}" if role else config.client_id,
        "request_timeout_ms": round(config.request_timeout_s * 1000),
        "metadata_max_age_ms": round(config.metadata_max_age_s * 1000),
        "security_protocol": config.security_protocol,
    }
    if config.security_protocol.endswith("SSL"):
        settings["ssl_context"] = _ssl_context(config)
    if config.security_protocol.startswith("SASL"):
        if config.sasl_username is None or config.sasl_password is None:
            raise ConfigError("kafka.sasl_username and kafka.sasl_password are needed for SASL")
        settings["sasl_mechanism"] = config.sasl_mechanism or "PLAIN"
        settings["sasl_plain_username"] = config.sasl_username
        settings["sasl_plain_password"] = config.sasl_password.get_secret_value()
    return settings


def _ssl_context(config: KafkaConfig) -> ssl.SSLContext:
    cafile = None if config.ssl_cafile is None else str(config.ssl_cafile)
    try:
        context: ssl.SSLContext = create_ssl_context(cafile=cafile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"kafka.ssl_cafile: {error}") from error
    return context
