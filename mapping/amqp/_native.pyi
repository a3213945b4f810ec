from mapping.amqp.incoming import Mapper as Mapper
