"""What a client's connection tells of its flow: a window in each direction (MQTT 5.0 section 4.9)."""

from __future__ import annotations

from gateway.flow import ConnectionFlow, Window, shown, subject
from gateway.mqtt.session.session import Session
from gateway.net.pump import Pump
from gateway.pauses import PROCESS, PROCESS_BUDGET, RECEIVE_MAXIMUM, Pause, pauses
from protocols.mqtt.connection import Connection


def flow_of(session: Session, connection: Connection, pump: Pump) -> ConnectionFlow:
    """The flow of a connection that has its session."""
    inbound, outbound = connection.inbound, connection.outbound
    shared = pauses.since(PROCESS_BUDGET, PROCESS) if pump.is_paused_for(PROCESS_BUDGET) else None
    windows = [
        Window("PUBLISH from the client", True, "", inbound.limit, inbound.free, inbound.used),
        Window(
            "PUBLISH to the client",
            False,
            "",
            outbound.limit,
            outbound.free,
            outbound.used,
            None if outbound.free else Pause(RECEIVE_MAXIMUM),
        ),
    ]
    return ConnectionFlow(
        protocol="mqtt",
        client=shown(session.client_id),
        peer=pump.peer,
        principal=shown(session.principal),
        subject=subject("mqtt", session.client_id, pump.peer),
        bytes=session.budget.bytes,
        bytes_limit=session.budget.bytes_limit,
        records=session.budget.records,
        unwritten=pump.unwritten,
        windows=windows,
        windows_total=len(windows),
        paused=[] if shared is None else [shared],
    )
