from mapping.amqp.incoming import to_record as to_record
from mapping.amqp.incoming import to_records as to_records
from mapping.amqp.outgoing import from_records as from_records
