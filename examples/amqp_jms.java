// JMS 3.1 with Qpid JMS: send three readings to a queue, receive them from it.
// java -cp "$(.venv/bin/python -m tests.interop.fetch classpath qpid-jms)" examples/amqp_jms.java [HOST:PORT] [TOPIC]

import jakarta.jms.BytesMessage;
import jakarta.jms.Connection;
import jakarta.jms.JMSException;
import jakarta.jms.MessageConsumer;
import jakarta.jms.MessageProducer;
import jakarta.jms.Queue;
import jakarta.jms.Session;
import java.nio.charset.StandardCharsets;
import org.apache.qpid.jms.JmsConnectionFactory;

class Readings {
    public static void main(String[] arguments) throws JMSException {
        String address = arguments.length > 0 ? arguments[0] : "127.0.0.1:5672";
        String topic = arguments.length > 1 ? arguments[1] : "house";
        String[] readings = {"21.5", "21.7", "21.6"};
        try (Connection connection = new JmsConnectionFactory("amqp://" + address).createConnection()) {
            connection.start();
            Session session = connection.createSession(Session.CLIENT_ACKNOWLEDGE);
            // A queue is a consumer group of the Kafka topic with the same name.
            Queue queue = session.createQueue(topic);
            MessageProducer producer = session.createProducer(queue);
            for (String reading : readings) {
                BytesMessage message = session.createBytesMessage();
                message.writeBytes(reading.getBytes(StandardCharsets.UTF_8));
                message.setStringProperty("JMSXGroupID", "kitchen/temp"); // the record's key
                producer.send(message); // returns on `accepted`: every in-sync replica of Kafka has it
            }
            MessageConsumer consumer = session.createConsumer(queue);
            for (int count = 0; count < readings.length; count++) {
                BytesMessage message = (BytesMessage) consumer.receive(30_000);
                if (message == null) throw new JMSException("no message within 30 s");
                byte[] value = new byte[(int) message.getBodyLength()];
                message.readBytes(value);
                System.out.println(message.getStringProperty("JMSXGroupID") + " "
                        + new String(value, StandardCharsets.UTF_8));
                message.acknowledge(); // advances the group's offset
            }
        }
    }
}
