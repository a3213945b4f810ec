"""Settings for every aiokafka client, from the configuration."""

from __future__ import annotations

from typing import Any

from gateway.kafka.driver.broker_connection import use_broker_connections
from gateway.kafka.driver.login import logins
from gateway.settings.config import ConfigError, KafkaConfig

# Whoever has these settings, a script too, logs in with them: aiokafka's own connections cannot.
use_broker_connections()


def client_settings(config: KafkaConfig, role: str = "") -> dict[str, Any]:
    """Return the keyword arguments that producers, consumers and the admin client have in common.

    `role` is appended to the client id, so that the broker's log and quotas tell our clients apart.

    Raises:
        ConfigError: no bootstrap servers, or no usable credentials.
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
    login = logins.of(config)
    if login is not None:
        # For every mechanism: `BrokerConnection` reads its credentials from it. The others satisfy aiokafka's checks.
        settings["sasl_oauth_token_provider"] = login
        settings["ssl_context"] = login.context
        settings["sasl_mechanism"] = config.sasl_mechanism or "PLAIN"
        settings["sasl_plain_username"] = config.sasl_username
        settings["sasl_plain_password"] = ""
    return settings


def consumer_settings(config: KafkaConfig, role: str = "") -> dict[str, Any]:
    """Return `client_settings` for a consumer, which may read from the nearest replica."""
    settings = client_settings(config, role)
    if config.rack is not None:
        settings["client_rack"] = config.rack
    return settings
