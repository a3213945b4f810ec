"""Passwords that Kafka checks (`security.password_source = "kafka"`): each by a short SASL connection to it.

The connection is the client's own login, and ends with Kafka's verdict. A Kafka that does not answer says nothing about
a password: then the login is to be tried again later.
"""

from __future__ import annotations

import structlog

from gateway.config import ConfigError, KafkaConfig, SecurityConfig
from gateway.kafka.contracts import Refused
from gateway.kafka.driver.login_trial import LoginTrial
from gateway.security.credentials import Credentials
from gateway.security.turns import Unavailable

log = structlog.get_logger(__name__)


class KafkaPasswords:
    """As `credentials.Passwords`.

    Attributes:
        problem: why Kafka could not answer the last time, in a sentence.
    """

    def __init__(self, security: SecurityConfig, kafka: KafkaConfig) -> None:
        """Read the files of TLS.

        Raises:
            ConfigError: no Kafka to ask, or a file that cannot be used.
        """
        self.errors = 0
        self.started = True
        self.problem: str | None = None
        servers = security.password_servers or kafka.bootstrap_servers
        if servers is None:
            raise ConfigError('security.password_source = "kafka" needs security.password_servers or your own Kafka')
        protocol = security.password_protocol or kafka.security_protocol
        if not protocol.startswith("SASL"):
            raise ConfigError(
                f"security.password_protocol: clients cannot log in to Kafka by {protocol}: set SASL_SSL, and"
                " security.password_servers where that is another listener"
            )
        asked = {
            "bootstrap_servers": servers,
            "security_protocol": protocol,
            "sasl_mechanism": security.password_mechanism,
        }
        self._trial = LoginTrial(kafka.model_copy(update=asked))

    async def start(self) -> None:
        """Nothing: each check is a connection."""

    async def check(self, credentials: Credentials) -> bool:
        """Ask Kafka. Raises Unavailable: it does not answer, or takes nobody by this mechanism."""
        if "\0" in credentials.user or "\0" in credentials.password:
            return False  # it separates the fields of PLAIN
        try:
            right = await self._trial.is_right(credentials.user, credentials.password)
        except Refused as refused:
            self.errors += 1
            if refused.reason != self.problem:
                self.problem = refused.reason
                log.error("Kafka does not check passwords: clients are told to come again", reason=refused.reason)
            raise Unavailable("Kafka, which checks passwords, does not answer") from None
        if self.problem is not None:
            self.problem = None
            log.info("Kafka checks passwords again")
        return right

    async def stop(self) -> None:
        """Nothing is open."""
