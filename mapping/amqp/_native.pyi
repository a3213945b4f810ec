from mapping.amqp.incoming import Mapper as Mapper
from mapping.amqp.outgoing import from_records as from_records
