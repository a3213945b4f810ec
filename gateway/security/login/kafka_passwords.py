"""Passwords checked by Kafka (`security.password_source = "kafka"`), each with a short SASL connection to a broker.

The connection logs in as the client and closes after Kafka's answer. If Kafka does not answer, the password is neither
right nor wrong, and the client is asked to try again later.
"""

from __future__ import annotations

import structlog

from gateway.kafka.contracts import Refused
from gateway.kafka.driver.login_trial import LoginTrial
from gateway.security.fair_queue import Unavailable
from gateway.security.login.credentials import Credentials
from gateway.settings.config import ConfigError, KafkaConfig, SecurityConfig

log = structlog.get_logger(__name__)


class KafkaPasswords:
    """A `credentials.Passwords` that asks Kafka."""

    def __init__(self, security: SecurityConfig, kafka: KafkaConfig) -> None:
        """Load the TLS files; raises ConfigError also if there are no servers or their protocol has no login."""
        self.errors = 0
        self._problem: str | None = None  # why Kafka could not answer last time
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
        """Do nothing: each check opens its own connection."""

    async def check(self, credentials: Credentials) -> bool:
        """Log in to Kafka with the credentials. Raises Unavailable if Kafka does not answer or lacks the mechanism."""
        if "\0" in credentials.user or "\0" in credentials.password:
            return False  # NUL separates the fields of PLAIN
        try:
            right = await self._trial.accepts(credentials.user, credentials.password)
        except Refused as refused:
            self.errors += 1
            if refused.reason != self._problem:
                self._problem = refused.reason
                log.error("Kafka does not check passwords: logins are answered as busy", reason=refused.reason)
            raise Unavailable("Kafka does not answer the password check") from None
        if self._problem is not None:
            self._problem = None
            log.info("Kafka checks passwords again")
        return right

    async def stop(self) -> None:
        """Do nothing: no connection stays open."""
