from mapping.amqp.incoming import to_record as to_record
from mapping.amqp.outgoing import from_records as from_records
