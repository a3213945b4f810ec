// Drives HiveMQ's MQTT Client by the line protocol of drivers.py: commands on standard input, answers and events on
// standard output.

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import com.hivemq.client.mqtt.MqttGlobalPublishFilter;
import com.hivemq.client.mqtt.datatypes.MqttQos;
import com.hivemq.client.mqtt.datatypes.MqttTopicFilter;
import com.hivemq.client.mqtt.datatypes.MqttUtf8String;
import com.hivemq.client.mqtt.exceptions.MqttClientStateException;
import com.hivemq.client.mqtt.mqtt5.Mqtt5AsyncClient;
import com.hivemq.client.mqtt.mqtt5.Mqtt5Client;
import com.hivemq.client.mqtt.mqtt5.Mqtt5ClientConfig;
import com.hivemq.client.mqtt.mqtt5.auth.Mqtt5EnhancedAuthMechanism;
import com.hivemq.client.mqtt.mqtt5.datatypes.Mqtt5UserProperties;
import com.hivemq.client.mqtt.mqtt5.datatypes.Mqtt5UserProperty;
import com.hivemq.client.mqtt.mqtt5.exceptions.Mqtt5ConnAckException;
import com.hivemq.client.mqtt.mqtt5.exceptions.Mqtt5DisconnectException;
import com.hivemq.client.mqtt.mqtt5.exceptions.Mqtt5MessageException;
import com.hivemq.client.mqtt.mqtt5.exceptions.Mqtt5PubAckException;
import com.hivemq.client.mqtt.mqtt5.exceptions.Mqtt5PubRecException;
import com.hivemq.client.mqtt.mqtt5.exceptions.Mqtt5SubAckException;
import com.hivemq.client.mqtt.mqtt5.exceptions.Mqtt5UnsubAckException;
import com.hivemq.client.mqtt.mqtt5.message.Mqtt5Message;
import com.hivemq.client.mqtt.mqtt5.message.auth.Mqtt5Auth;
import com.hivemq.client.mqtt.mqtt5.message.auth.Mqtt5AuthBuilder;
import com.hivemq.client.mqtt.mqtt5.message.auth.Mqtt5EnhancedAuthBuilder;
import com.hivemq.client.mqtt.mqtt5.message.connect.Mqtt5Connect;
import com.hivemq.client.mqtt.mqtt5.message.connect.Mqtt5ConnectRestrictions;
import com.hivemq.client.mqtt.mqtt5.message.connect.connack.Mqtt5ConnAck;
import com.hivemq.client.mqtt.mqtt5.message.disconnect.Mqtt5Disconnect;
import com.hivemq.client.mqtt.mqtt5.message.disconnect.Mqtt5DisconnectReasonCode;
import com.hivemq.client.mqtt.mqtt5.message.publish.Mqtt5PayloadFormatIndicator;
import com.hivemq.client.mqtt.mqtt5.message.publish.Mqtt5Publish;
import com.hivemq.client.mqtt.mqtt5.message.publish.Mqtt5PublishResult;
import com.hivemq.client.mqtt.mqtt5.message.publish.Mqtt5WillPublish;
import com.hivemq.client.mqtt.mqtt5.message.publish.puback.Mqtt5PubAck;
import com.hivemq.client.mqtt.mqtt5.message.publish.pubrec.Mqtt5PubRec;
import com.hivemq.client.mqtt.mqtt5.message.subscribe.Mqtt5RetainHandling;
import com.hivemq.client.mqtt.mqtt5.message.subscribe.Mqtt5Subscribe;
import com.hivemq.client.mqtt.mqtt5.message.subscribe.Mqtt5Subscription;
import com.hivemq.client.mqtt.mqtt5.message.subscribe.suback.Mqtt5SubAck;
import com.hivemq.client.mqtt.mqtt5.message.unsubscribe.Mqtt5Unsubscribe;
import com.hivemq.client.mqtt.mqtt5.message.unsubscribe.unsuback.Mqtt5UnsubAck;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.InetSocketAddress;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.security.GeneralSecurityException;
import java.security.MessageDigest;
import java.security.SecureRandom;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.TimeUnit;
import javax.crypto.Mac;
import javax.crypto.SecretKeyFactory;
import javax.crypto.spec.PBEKeySpec;
import javax.crypto.spec.SecretKeySpec;

public class Driver {
    static final ObjectMapper JSON = new ObjectMapper();
    static final PrintStream OUT = new PrintStream(System.out, false, StandardCharsets.UTF_8);

    final String name;
    final Mqtt5AsyncClient client;
    final ArrayDeque<Mqtt5Publish> held = new ArrayDeque<>();

    Driver(JsonNode command) {
        name = command.get("client").asText();
        InetSocketAddress address = new InetSocketAddress(command.get("host").asText(), command.get("port").asInt());
        var builder = Mqtt5Client.builder().serverAddress(address);
        builder = builder.addDisconnectedListener(context -> closed(context.getCause()));
        if (!command.get("id").asText().isEmpty()) builder = builder.identifier(command.get("id").asText());
        client = builder.buildAsync();
        boolean holds = command.path("hold").asBoolean();
        // Registered before the first CONNECT, because a persistent session's messages follow CONNACK immediately.
        client.publishes(MqttGlobalPublishFilter.ALL, publish -> received(publish, holds), holds);
    }

    static synchronized void say(ObjectNode line) {
        OUT.println(line);
        OUT.flush();
    }

    static byte[] bytes(JsonNode base64) {
        return Base64.getDecoder().decode(base64.asText());
    }

    static byte[] bytes(ByteBuffer buffer) {
        byte[] out = new byte[buffer.remaining()];
        buffer.get(out);
        return out;
    }

    static String base64(byte[] data) {
        return Base64.getEncoder().encodeToString(data);
    }

    // properties

    static Mqtt5UserProperties pairs(JsonNode properties) {
        var builder = Mqtt5UserProperties.builder();
        for (JsonNode pair : properties.path("user_properties"))
            builder.add(pair.get(0).asText(), pair.get(1).asText());
        return builder.build();
    }

    static void tell(ObjectNode properties, Mqtt5UserProperties own) {
        if (own.asList().isEmpty()) return;
        ArrayNode list = properties.putArray("user_properties");
        for (Mqtt5UserProperty pair : own.asList())
            list.addArray().add(pair.getName().toString()).add(pair.getValue().toString());
    }

    static void tell(ObjectNode properties, String key, Optional<MqttUtf8String> text) {
        text.ifPresent(value -> properties.put(key, value.toString()));
    }

    static Mqtt5Publish publish(JsonNode from) {
        JsonNode properties = from.path("properties");
        var builder =
                Mqtt5Publish.builder()
                        .topic(from.get("topic").asText())
                        .payload(bytes(from.get("payload")))
                        .qos(MqttQos.fromCode(from.get("qos").asInt()))
                        .retain(from.get("retain").asBoolean())
                        .userProperties(pairs(properties));
        if (properties.has("message_expiry_interval"))
            builder = builder.messageExpiryInterval(properties.get("message_expiry_interval").asLong());
        if (properties.has("payload_format_indicator"))
            builder =
                    builder.payloadFormatIndicator(
                            Mqtt5PayloadFormatIndicator.fromCode(properties.get("payload_format_indicator").asInt()));
        if (properties.has("content_type")) builder = builder.contentType(properties.get("content_type").asText());
        if (properties.has("response_topic"))
            builder = builder.responseTopic(properties.get("response_topic").asText());
        if (properties.has("correlation_data"))
            builder = builder.correlationData(bytes(properties.get("correlation_data")));
        return builder.build();
    }

    // events

    void received(Mqtt5Publish publish, boolean holds) {
        ObjectNode line = JSON.createObjectNode().put("client", name).put("event", "message");
        line.put("topic", publish.getTopic().toString()).put("payload", base64(publish.getPayloadAsBytes()));
        line.put("qos", publish.getQos().getCode()).put("retain", publish.isRetain()).putNull("dup");
        ObjectNode properties = line.putObject("properties");
        publish.getMessageExpiryInterval().ifPresent(value -> properties.put("message_expiry_interval", value));
        var format = publish.getPayloadFormatIndicator();
        format.ifPresent(value -> properties.put("payload_format_indicator", value.getCode()));
        tell(properties, "content_type", publish.getContentType());
        publish.getResponseTopic().ifPresent(value -> properties.put("response_topic", value.toString()));
        publish.getCorrelationData().ifPresent(value -> properties.put("correlation_data", base64(bytes(value))));
        tell(properties, publish.getUserProperties());
        if (holds)
            synchronized (held) {
                held.add(publish);
            }
        say(line);
    }

    void closed(Throwable cause) {
        ObjectNode line = JSON.createObjectNode().put("client", name).put("event", "closed");
        line.put("cause", cause.toString());
        if (cause instanceof Mqtt5DisconnectException) {
            Mqtt5Disconnect said = ((Mqtt5DisconnectException) cause).getMqttMessage();
            line.put("reason", said.getReasonCode().getCode());
            tell(line.putObject("properties"), "reason_string", said.getReasonString());
        }
        say(line);
    }

    // commands

    CompletableFuture<ObjectNode> connect(JsonNode command) {
        JsonNode properties = command.get("properties");
        var restrictions = Mqtt5ConnectRestrictions.builder();
        if (properties.has("receive_maximum"))
            restrictions.receiveMaximum(properties.get("receive_maximum").asInt());
        if (properties.has("maximum_packet_size"))
            restrictions.maximumPacketSize(properties.get("maximum_packet_size").asInt());
        restrictions.topicAliasMaximum(properties.path("topic_alias_maximum").asInt(0));
        restrictions.sendTopicAliasMaximum(command.get("send_aliases").asBoolean() ? 16 : 0);
        restrictions.requestResponseInformation(properties.path("request_response_information").asInt(0) == 1);
        restrictions.requestProblemInformation(properties.path("request_problem_information").asInt(1) == 1);
        var builder =
                Mqtt5Connect.builder()
                        .cleanStart(command.get("clean").asBoolean())
                        .keepAlive(command.get("keep_alive").asInt())
                        .sessionExpiryInterval(properties.path("session_expiry_interval").asLong(0))
                        .restrictions(restrictions.build())
                        .userProperties(pairs(properties));
        if (command.hasNonNull("user")) {
            byte[] password = command.get("password").asText().getBytes(StandardCharsets.UTF_8);
            builder = builder.simpleAuth().username(command.get("user").asText()).password(password).applySimpleAuth();
        }
        if (command.has("scram")) builder = builder.enhancedAuth(new Scram(command.get("scram")));
        if (command.has("will")) {
            Mqtt5WillPublish will = publish(command.get("will")).asWill();
            long delay = command.get("will").get("properties").path("will_delay_interval").asLong(0);
            builder = builder.willPublish(will.extendAsWill().delayInterval(delay).build());
        }
        return connect(builder.build())
                .exceptionally(error -> (Mqtt5ConnAck) refusal(error, Mqtt5ConnAckException.class))
                .thenApply(Driver::connack);
    }

    /** Connect as soon as it may be: the end of a connection is told shortly before. */
    CompletableFuture<Mqtt5ConnAck> connect(Mqtt5Connect message) {
        return client.connect(message)
                .handle(
                        (connack, error) -> {
                            Throwable cause = error instanceof CompletionException ? error.getCause() : error;
                            if (cause == null) return CompletableFuture.completedFuture(connack);
                            if (!(cause instanceof MqttClientStateException))
                                return CompletableFuture.<Mqtt5ConnAck>failedFuture(cause);
                            var soon = CompletableFuture.delayedExecutor(5, TimeUnit.MILLISECONDS);
                            return CompletableFuture.supplyAsync(() -> message, soon).thenCompose(this::connect);
                        })
                .thenCompose(connected -> connected);
    }

    static ObjectNode connack(Mqtt5ConnAck connack) {
        ObjectNode result = JSON.createObjectNode().put("reason", connack.getReasonCode().getCode());
        result.put("session_present", connack.isSessionPresent());
        ObjectNode properties = result.putObject("properties");
        connack.getSessionExpiryInterval().ifPresent(value -> properties.put("session_expiry_interval", value));
        connack.getServerKeepAlive().ifPresent(value -> properties.put("server_keep_alive", value));
        var assigned = connack.getAssignedClientIdentifier();
        assigned.ifPresent(value -> properties.put("assigned_client_identifier", value.toString()));
        tell(properties, "response_information", connack.getResponseInformation());
        tell(properties, "server_reference", connack.getServerReference());
        tell(properties, "reason_string", connack.getReasonString());
        properties.put("receive_maximum", connack.getRestrictions().getReceiveMaximum());
        properties.put("topic_alias_maximum", connack.getRestrictions().getTopicAliasMaximum());
        properties.put("maximum_packet_size", connack.getRestrictions().getMaximumPacketSize());
        tell(properties, connack.getUserProperties());
        return result;
    }

    CompletableFuture<ObjectNode> subscribe(JsonNode command) {
        List<Mqtt5Subscription> wanted = new ArrayList<>();
        for (JsonNode one : command.get("filters"))
            wanted.add(
                    Mqtt5Subscription.builder()
                            .topicFilter(one.get("filter").asText())
                            .qos(MqttQos.fromCode(one.get("qos").asInt()))
                            .noLocal(one.get("no_local").asBoolean())
                            .retainAsPublished(one.get("retain_as_published").asBoolean())
                            .retainHandling(Mqtt5RetainHandling.fromCode(one.get("retain_handling").asInt()))
                            .build());
        var message = Mqtt5Subscribe.builder().addSubscriptions(wanted);
        return client.subscribe(message.userProperties(pairs(command.get("properties"))).build())
                .exceptionally(error -> (Mqtt5SubAck) refusal(error, Mqtt5SubAckException.class))
                .thenApply(
                        suback -> {
                            ObjectNode result = JSON.createObjectNode();
                            ArrayNode reasons = result.putArray("reasons");
                            suback.getReasonCodes().forEach(code -> reasons.add(code.getCode()));
                            tell(result.putObject("properties"), "reason_string", suback.getReasonString());
                            return result;
                        });
    }

    CompletableFuture<ObjectNode> unsubscribe(JsonNode command) {
        List<MqttTopicFilter> filters = new ArrayList<>();
        for (JsonNode one : command.get("filters")) filters.add(MqttTopicFilter.of(one.asText()));
        return client.unsubscribe(Mqtt5Unsubscribe.builder().addTopicFilters(filters).build())
                .exceptionally(error -> (Mqtt5UnsubAck) refusal(error, Mqtt5UnsubAckException.class))
                .thenApply(
                        unsuback -> {
                            ObjectNode result = JSON.createObjectNode();
                            ArrayNode reasons = result.putArray("reasons");
                            unsuback.getReasonCodes().forEach(code -> reasons.add(code.getCode()));
                            return result;
                        });
    }

    CompletableFuture<ObjectNode> send(JsonNode command) {
        return client.publish(publish(command)).handle((result, error) -> published(result, error));
    }

    static ObjectNode published(Mqtt5PublishResult result, Throwable error) {
        ObjectNode out = JSON.createObjectNode();
        Throwable cause = error instanceof CompletionException ? error.getCause() : error;
        if (cause instanceof Mqtt5PubAckException) {
            Mqtt5PubAck puback = ((Mqtt5PubAckException) cause).getMqttMessage();
            out.put("reason", puback.getReasonCode().getCode());
            tell(out.putObject("properties"), "reason_string", puback.getReasonString());
        } else if (cause instanceof Mqtt5PubRecException) {
            Mqtt5PubRec pubrec = ((Mqtt5PubRecException) cause).getMqttMessage();
            out.put("reason", pubrec.getReasonCode().getCode());
            tell(out.putObject("properties"), "reason_string", pubrec.getReasonString());
        } else if (cause != null) {
            throw new CompletionException(cause);
        } else {
            int reason = 0;
            if (result instanceof Mqtt5PublishResult.Mqtt5Qos1Result)
                reason = ((Mqtt5PublishResult.Mqtt5Qos1Result) result).getPubAck().getReasonCode().getCode();
            else if (result instanceof Mqtt5PublishResult.Mqtt5Qos2Result)
                reason = ((Mqtt5PublishResult.Mqtt5Qos2Result) result).getPubRec().getReasonCode().getCode();
            out.put("reason", reason).putObject("properties");
        }
        return out;
    }

    CompletableFuture<ObjectNode> acknowledge(JsonNode command) {
        for (int left = command.get("count").asInt(); left > 0; left--) {
            Mqtt5Publish publish;
            synchronized (held) {
                publish = held.remove();
            }
            publish.acknowledge();
        }
        return CompletableFuture.completedFuture(JSON.createObjectNode());
    }

    CompletableFuture<ObjectNode> disconnect(JsonNode command) {
        JsonNode properties = command.get("properties");
        var builder =
                Mqtt5Disconnect.builder().reasonCode(Mqtt5DisconnectReasonCode.fromCode(command.get("reason").asInt()));
        if (properties.has("session_expiry_interval"))
            builder = builder.sessionExpiryInterval(properties.get("session_expiry_interval").asLong());
        return client.disconnect(builder.build()).thenApply(nothing -> JSON.createObjectNode());
    }

    CompletableFuture<ObjectNode> release() {
        return client.disconnect().handle((nothing, error) -> JSON.createObjectNode());
    }

    CompletableFuture<ObjectNode> reauthenticate() {
        return client.reauth().thenApply(nothing -> JSON.createObjectNode());
    }

    CompletableFuture<ObjectNode> run(JsonNode command) {
        switch (command.get("do").asText()) {
            case "connect": return connect(command);
            case "subscribe": return subscribe(command);
            case "unsubscribe": return unsubscribe(command);
            case "publish": return send(command);
            case "flush": return CompletableFuture.completedFuture(JSON.createObjectNode());
            case "acknowledge": return acknowledge(command);
            case "disconnect": return disconnect(command);
            case "reauthenticate": return reauthenticate();
            default: throw new IllegalArgumentException("no such command: " + command);
        }
    }

    /** The packet by which the server refused; any other failure is thrown on. */
    static Mqtt5Message refusal(Throwable error, Class<? extends Mqtt5MessageException> kind) {
        Throwable cause = error instanceof CompletionException ? error.getCause() : error;
        if (kind.isInstance(cause)) return kind.cast(cause).getMqttMessage();
        throw new CompletionException(cause);
    }

    public static void main(String[] arguments) throws Exception {
        Map<String, Driver> clients = new HashMap<>();
        say(JSON.createObjectNode().put("event", "ready").put("name", "HiveMQ").put("version", arguments[0]));
        var reader = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = reader.readLine(); line != null; line = reader.readLine()) {
            JsonNode command = JSON.readTree(line);
            CompletableFuture<ObjectNode> answer;
            try {
                String name = command.get("client").asText();
                if (command.get("do").asText().equals("release")) {
                    answer = clients.remove(name).release();
                } else {
                    answer = clients.computeIfAbsent(name, key -> new Driver(command)).run(command);
                }
            } catch (RuntimeException error) {
                answer = CompletableFuture.failedFuture(error);
            }
            answer.whenComplete(
                    (result, error) -> {
                        ObjectNode out = JSON.createObjectNode().put("n", command.get("n").asInt());
                        if (error == null) out.set("result", result);
                        else out.put("error", error.toString());
                        say(out);
                    });
        }
        System.exit(0);
    }

    /** RFC 5802 and 7677, without channel binding; also again on an open connection. */
    static class Scram implements Mqtt5EnhancedAuthMechanism {
        final String user;
        final String password;
        String bare;
        String proof;

        Scram(JsonNode login) {
            user = login.get("user").asText();
            password = login.get("password").asText();
        }

        byte[] first() {
            byte[] nonce = new byte[18];
            new SecureRandom().nextBytes(nonce);
            bare = "n=" + user + ",r=" + base64(nonce);
            return ("n,," + bare).getBytes(StandardCharsets.UTF_8);
        }

        static byte[] hmac(byte[] key, String text) throws GeneralSecurityException {
            Mac mac = Mac.getInstance("HmacSHA256");
            mac.init(new SecretKeySpec(key, "HmacSHA256"));
            return mac.doFinal(text.getBytes(StandardCharsets.UTF_8));
        }

        byte[] last(String challenge) {
            Map<String, String> fields = new HashMap<>();
            for (String part : challenge.split(",")) fields.put(part.substring(0, 1), part.substring(2));
            try {
                byte[] salt = Base64.getDecoder().decode(fields.get("s"));
                var spec = new PBEKeySpec(password.toCharArray(), salt, Integer.parseInt(fields.get("i")), 256);
                byte[] salted = SecretKeyFactory.getInstance("PBKDF2WithHmacSHA256").generateSecret(spec).getEncoded();
                byte[] key = hmac(salted, "Client Key");
                String without = "c=biws,r=" + fields.get("r");
                String message = bare + "," + challenge + "," + without;
                byte[] signature = hmac(MessageDigest.getInstance("SHA-256").digest(key), message);
                for (int at = 0; at < key.length; at++) key[at] ^= signature[at];
                proof = "v=" + base64(hmac(hmac(salted, "Server Key"), message));
                return (without + ",p=" + base64(key)).getBytes(StandardCharsets.UTF_8);
            } catch (GeneralSecurityException error) {
                throw new IllegalStateException(error);
            }
        }

        static String text(Optional<ByteBuffer> data) {
            return data.map(buffer -> StandardCharsets.UTF_8.decode(buffer).toString()).orElse("");
        }

        boolean isProven(Optional<ByteBuffer> data) {
            return text(data).equals(proof);
        }

        @Override
        public MqttUtf8String getMethod() {
            return MqttUtf8String.of("SCRAM-SHA-256");
        }

        @Override
        public int getTimeout() {
            return 10;
        }

        @Override
        public CompletableFuture<Void> onAuth(
                Mqtt5ClientConfig config, Mqtt5Connect connect, Mqtt5EnhancedAuthBuilder builder) {
            builder.data(first());
            return CompletableFuture.completedFuture(null);
        }

        @Override
        public CompletableFuture<Void> onReAuth(Mqtt5ClientConfig config, Mqtt5AuthBuilder builder) {
            builder.data(first());
            return CompletableFuture.completedFuture(null);
        }

        @Override
        public CompletableFuture<Boolean> onContinue(
                Mqtt5ClientConfig config, Mqtt5Auth auth, Mqtt5AuthBuilder builder) {
            builder.data(last(text(auth.getData())));
            return CompletableFuture.completedFuture(true);
        }

        @Override
        public CompletableFuture<Boolean> onAuthSuccess(Mqtt5ClientConfig config, Mqtt5ConnAck connack) {
            var data = connack.getEnhancedAuth().flatMap(auth -> auth.getData());
            return CompletableFuture.completedFuture(isProven(data));
        }

        @Override
        public CompletableFuture<Boolean> onReAuthSuccess(Mqtt5ClientConfig config, Mqtt5Auth auth) {
            return CompletableFuture.completedFuture(isProven(auth.getData()));
        }

        @Override
        public void onAuthRejected(Mqtt5ClientConfig config, Mqtt5ConnAck connack) {}

        @Override
        public void onReAuthRejected(Mqtt5ClientConfig config, Mqtt5Disconnect disconnect) {}

        @Override
        public void onAuthError(Mqtt5ClientConfig config, Throwable cause) {}

        @Override
        public void onReAuthError(Mqtt5ClientConfig config, Throwable cause) {}
    }
}
