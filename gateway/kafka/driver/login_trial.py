"""Check a client's name and password by logging in to Kafka with them, on a short-lived connection."""

from __future__ import annotations

import asyncio
import random
from typing import Final

from aiokafka.conn import collect_hosts
from aiokafka.errors import KafkaError, SaslAuthenticationFailed
from pydantic import SecretStr

from gateway.kafka.contracts import Refused
from gateway.kafka.driver.broker_connection import BrokerConnection
from gateway.kafka.driver.login import Login
from gateway.settings.kafka import KafkaConfig
from gateway.settings.values import ConfigError
from mapping.outcomes import Outcome

ANSWER_S: Final = 3.0  # for one server


class LoginTrial:
    """Checks names and passwords against Kafka."""

    def __init__(self, kafka: KafkaConfig) -> None:
        """Use the servers, protocol, SASL mechanism and authorities of `kafka`, but not its credentials.

        Raises:
            ConfigError: a TLS file cannot be used.
        """
        assert kafka.bootstrap_servers is not None
        self._servers = collect_hosts(kafka.bootstrap_servers)
        self._kafka = kafka
        # Only for its certificates.
        no_password = {"sasl_username": "", "sasl_password": SecretStr(""), "sasl_password_file": None}
        self._tls = Login(kafka.model_copy(update=no_password))

    async def accepts(self, user: str, password: str) -> bool:
        """Whether Kafka accepts the login. Raises Refused (BUSY) when no server answers."""
        problem = ""
        for host, port, _ in random.sample(self._servers, len(self._servers)):
            try:
                async with asyncio.timeout(ANSWER_S):
                    return await self._log_in(host, port, user, password)
            except (KafkaError, OSError, TimeoutError, ConfigError, ValueError) as error:  # ValueError: SCRAM's
                problem = f"{host}:{port}: {type(error).__name__}"
        raise Refused(Outcome.BUSY, problem)

    async def _log_in(self, host: str, port: int, user: str, password: str) -> bool:
        connection = BrokerConnection(
            host,
            port,
            client_id=f"{self._kafka.client_id}-password",
            request_timeout_ms=round(1000 * ANSWER_S),
            ssl_context=self._tls.context,
            security_protocol=self._kafka.security_protocol,
            sasl_mechanism=self._kafka.sasl_mechanism,
            sasl_plain_username=user,
            sasl_plain_password=password,
        )
        try:
            await connection.connect()
        except SaslAuthenticationFailed:
            return False
        finally:
            connection.close()
        return True
