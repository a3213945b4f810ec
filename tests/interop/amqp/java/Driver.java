// Drives Qpid JMS by the line protocol of jms.py: commands on standard input, answers and events on standard output.

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import jakarta.jms.BytesMessage;
import jakarta.jms.Connection;
import jakarta.jms.DeliveryMode;
import jakarta.jms.Destination;
import jakarta.jms.JMSException;
import jakarta.jms.MapMessage;
import jakarta.jms.Message;
import jakarta.jms.MessageConsumer;
import jakarta.jms.MessageEOFException;
import jakarta.jms.MessageProducer;
import jakarta.jms.ObjectMessage;
import jakarta.jms.Queue;
import jakarta.jms.Session;
import jakarta.jms.StreamMessage;
import jakarta.jms.TemporaryQueue;
import jakarta.jms.TemporaryTopic;
import jakarta.jms.TextMessage;
import jakarta.jms.Topic;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.io.Serializable;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Base64;
import java.util.Collections;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import org.apache.qpid.jms.JmsConnectionFactory;

@SuppressWarnings("unchecked") // JMS has raw Enumerations
public class Driver {
    static final ObjectMapper JSON = new ObjectMapper();
    static final PrintStream OUT = new PrintStream(System.out, false, StandardCharsets.UTF_8);
    static final Map<String, Integer> MODES = Map.of(
            "auto", Session.AUTO_ACKNOWLEDGE, "client", Session.CLIENT_ACKNOWLEDGE,
            "dups_ok", Session.DUPS_OK_ACKNOWLEDGE, "transacted", Session.SESSION_TRANSACTED);

    final String name;
    // A connection's objects are used in one thread, because JMS sessions are single-threaded.
    final ExecutorService thread = Executors.newSingleThreadExecutor();
    final Map<String, Session> sessions = new HashMap<>();
    final Map<String, MessageConsumer> consumers = new HashMap<>();
    final Map<String, MessageProducer> producers = new HashMap<>();
    final Map<String, Destination> temporaries = new HashMap<>();
    final List<Message> held = new ArrayList<>();
    Connection connection;

    Driver(String name) {
        this.name = name;
    }

    static synchronized void say(ObjectNode line) {
        OUT.println(line);
        OUT.flush();
    }

    static String base64(byte[] data) {
        return Base64.getEncoder().encodeToString(data);
    }

    // values

    static Object value(JsonNode told) {
        if (told.isObject()) return Base64.getDecoder().decode(told.get("@binary").asText());
        if (told.isBoolean()) return told.asBoolean();
        if (told.isIntegralNumber()) return told.asLong();
        if (told.isNumber()) return told.asDouble();
        return told.isNull() ? null : told.asText();
    }

    static JsonNode tell(Object value) {
        if (value instanceof byte[] data) return JSON.createObjectNode().put("@binary", base64(data));
        return JSON.valueToTree(value);
    }

    Destination destination(Session session, String told) throws JMSException {
        String own = told.substring(told.indexOf(':') + 1);
        return switch (told.substring(0, told.indexOf(':'))) {
            case "queue" -> session.createQueue(own);
            case "topic" -> session.createTopic(own);
            case "temporary" -> temporaries.get(own);
            default -> held.get(Integer.parseInt(own)).getJMSReplyTo();
        };
    }

    static String tell(Destination destination) throws JMSException {
        if (destination instanceof TemporaryQueue queue) return "temporary-queue:" + queue.getQueueName();
        if (destination instanceof TemporaryTopic topic) return "temporary-topic:" + topic.getTopicName();
        if (destination instanceof Queue queue) return "queue:" + queue.getQueueName();
        return destination instanceof Topic topic ? "topic:" + topic.getTopicName() : null;
    }

    Message message(Session session, JsonNode told) throws JMSException {
        JsonNode body = told.path("body");
        Message out = switch (told.path("kind").asText("text")) {
            case "text" -> session.createTextMessage(body.asText());
            case "bytes" -> {
                BytesMessage bytes = session.createBytesMessage();
                bytes.writeBytes((byte[]) value(body));
                yield bytes;
            }
            case "map" -> {
                MapMessage map = session.createMapMessage();
                for (Iterator<String> keys = body.fieldNames(); keys.hasNext(); ) {
                    String key = keys.next();
                    map.setObject(key, value(body.get(key)));
                }
                yield map;
            }
            case "stream" -> {
                StreamMessage stream = session.createStreamMessage();
                for (JsonNode one : body) stream.writeObject(value(one));
                yield stream;
            }
            case "object" -> {
                ArrayList<Object> list = new ArrayList<>();
                for (JsonNode one : body) list.add(value(one));
                yield session.createObjectMessage((Serializable) list);
            }
            default -> session.createMessage();
        };
        for (Iterator<String> keys = told.path("properties").fieldNames(); keys.hasNext(); ) {
            String key = keys.next();
            Object property = value(told.get("properties").get(key));
            // JMSXGroupSeq is an int.
            if (key.equals("JMSXGroupSeq")) out.setIntProperty(key, ((Long) property).intValue());
            else out.setObjectProperty(key, property);
        }
        if (told.has("correlation_id")) out.setJMSCorrelationID(told.get("correlation_id").asText());
        if (told.has("type")) out.setJMSType(told.get("type").asText());
        if (told.has("reply_to")) out.setJMSReplyTo(destination(session, told.get("reply_to").asText()));
        return out;
    }

    ObjectNode tell(Message message) throws JMSException {
        ObjectNode told = JSON.createObjectNode().put("held", held.size());
        held.add(message);
        if (message instanceof TextMessage text) {
            told.put("kind", "text").put("body", text.getText());
        } else if (message instanceof BytesMessage bytes) {
            byte[] data = new byte[(int) bytes.getBodyLength()];
            bytes.readBytes(data);
            told.put("kind", "bytes").set("body", tell((Object) data));
        } else if (message instanceof MapMessage map) {
            ObjectNode body = told.put("kind", "map").putObject("body");
            for (Object key : Collections.list(map.getMapNames())) body.set((String) key, tell(map.getObject((String) key)));
        } else if (message instanceof StreamMessage stream) {
            ArrayNode body = told.put("kind", "stream").putArray("body");
            try {
                while (true) body.add(tell(stream.readObject()));
            } catch (MessageEOFException end) {
                // no more messages
            }
        } else if (message instanceof ObjectMessage object) {
            told.put("kind", "object").set("body", tell(object.getObject()));
        } else {
            told.put("kind", "plain");
        }
        ObjectNode properties = told.putObject("properties");
        for (Object key : Collections.list(message.getPropertyNames()))
            properties.set((String) key, tell(message.getObjectProperty((String) key)));
        told.put("id", message.getJMSMessageID()).put("correlation_id", message.getJMSCorrelationID());
        told.put("type", message.getJMSType()).put("priority", message.getJMSPriority());
        told.put("expiration", message.getJMSExpiration()).put("timestamp", message.getJMSTimestamp());
        told.put("persistent", message.getJMSDeliveryMode() == DeliveryMode.PERSISTENT);
        told.put("redelivered", message.getJMSRedelivered());
        told.put("delivery_count", message.getIntProperty("JMSXDeliveryCount"));
        told.put("destination", tell(message.getJMSDestination())).put("reply_to", tell(message.getJMSReplyTo()));
        return told;
    }

    // commands

    ObjectNode run(JsonNode command) throws JMSException {
        ObjectNode result = JSON.createObjectNode();
        String own = command.path("name").asText();
        Session session = sessions.get(command.path("session").asText());
        switch (command.get("do").asText()) {
            case "connect" -> {
                JmsConnectionFactory factory = new JmsConnectionFactory(command.get("uri").asText());
                connection = command.hasNonNull("user")
                        ? factory.createConnection(command.get("user").asText(), command.get("password").asText())
                        : factory.createConnection();
                connection.setExceptionListener(error -> say(JSON.createObjectNode().put("client", name)
                        .put("event", "closed").put("reason", String.valueOf(error.getMessage()))));
                if (command.hasNonNull("id")) connection.setClientID(command.get("id").asText());
                connection.start();
            }
            case "session" -> {
                String mode = command.get("mode").asText();
                sessions.put(own, connection.createSession(mode.equals("transacted"), MODES.get(mode)));
            }
            case "temporary" -> {
                Destination made = command.get("topic").asBoolean()
                        ? session.createTemporaryTopic() : session.createTemporaryQueue();
                temporaries.put(own, made);
                result.put("address", tell(made));
            }
            case "delete" -> {
                if (temporaries.get(own) instanceof TemporaryQueue queue) queue.delete();
                else ((TemporaryTopic) temporaries.get(own)).delete();
            }
            case "producer" -> {
                Destination to = command.hasNonNull("destination")
                        ? destination(session, command.get("destination").asText()) : null;
                producers.put(own, session.createProducer(to));
            }
            case "consumer" -> {
                Destination from = destination(session, command.get("destination").asText());
                String selector = command.path("selector").asText(null);
                String as = command.path("as").asText();
                consumers.put(own, switch (command.path("kind").asText("plain")) {
                    case "durable" -> session.createDurableConsumer((Topic) from, as, selector, false);
                    case "shared" -> session.createSharedConsumer((Topic) from, as, selector);
                    case "shared durable" -> session.createSharedDurableConsumer((Topic) from, as, selector);
                    default -> session.createConsumer(from, selector, command.path("no_local").asBoolean());
                });
            }
            case "send" -> {
                MessageProducer producer = producers.get(own);
                ArrayNode ids = result.putArray("ids");
                for (JsonNode told : command.get("messages")) {
                    Message message = message(session, told);
                    int mode = told.path("persistent").asBoolean(true) ? DeliveryMode.PERSISTENT : DeliveryMode.NON_PERSISTENT;
                    int priority = told.path("priority").asInt(4);
                    long ttl = told.path("ttl").asLong(0);
                    producer.setDeliveryDelay(told.path("delay").asLong(0));
                    if (told.has("to"))
                        producer.send(destination(session, told.get("to").asText()), message, mode, priority, ttl);
                    else producer.send(message, mode, priority, ttl);
                    ids.add(message.getJMSMessageID());
                }
            }
            case "receive" -> {
                ArrayNode messages = result.putArray("messages");
                long until = System.nanoTime() + command.get("ms").asLong() * 1_000_000;
                while (messages.size() < command.get("count").asInt()) {
                    long left = (until - System.nanoTime()) / 1_000_000;
                    Message message = left > 0 ? consumers.get(own).receive(left) : consumers.get(own).receiveNoWait();
                    if (message == null) break;
                    messages.add(tell(message));
                }
            }
            case "browse" -> {
                Queue queue = (Queue) destination(session, command.get("destination").asText());
                ArrayNode messages = result.putArray("messages");
                try (var browser = session.createBrowser(queue, command.path("selector").asText(null))) {
                    for (Object message : Collections.list(browser.getEnumeration())) messages.add(tell((Message) message));
                }
            }
            case "acknowledge" -> held.get(command.get("held").asInt()).acknowledge();
            case "recover" -> session.recover();
            case "commit" -> session.commit();
            case "rollback" -> session.rollback();
            case "unsubscribe" -> session.unsubscribe(own);
            case "close consumer" -> consumers.remove(own).close();
            case "close session" -> sessions.remove(own).close();
            default -> {
                if (connection != null) connection.close();
                connection = null;
            }
        }
        return result;
    }

    void answer(JsonNode command) {
        ObjectNode line = JSON.createObjectNode();
        line.set("n", command.get("n"));
        try {
            line.set("result", run(command));
        } catch (JMSException | RuntimeException error) {
            line.put("error", error.getClass().getSimpleName() + ": " + error.getMessage());
        }
        say(line);
        if (command.get("do").asText().equals("release")) thread.shutdown();
    }

    public static void main(String[] arguments) throws Exception {
        say(JSON.createObjectNode().put("event", "ready").put("name", "Qpid JMS").put("version", arguments[0]));
        Map<String, Driver> clients = new HashMap<>();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            JsonNode command = JSON.readTree(line);
            String name = command.get("client").asText();
            Driver client = clients.computeIfAbsent(name, Driver::new);
            client.thread.execute(() -> client.answer(command));
            if (command.get("do").asText().equals("release")) clients.remove(name);
        }
        System.exit(0);
    }
}
