from protocols.amqp.deliveries import accept as accept
from protocols.amqp.deliveries import send as send
from protocols.amqp.deliveries import take_usual as take_usual
from protocols.amqp.formats import scan as scan
