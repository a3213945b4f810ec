// AMQP 1.0 with rhea: send three readings, receive them as a member of a consumer group, accept them.
// node examples/amqp_rhea.js [HOST:PORT] [TOPIC]          (npm install rhea)

const rhea = require("rhea");

const [address = "127.0.0.1:5672", topic = "house"] = process.argv.slice(2);
const [host, port] = [address.slice(0, address.lastIndexOf(":")), address.slice(address.lastIndexOf(":") + 1)];
const readings = ["21.5", "21.7", "21.6"];
let unsent = [...readings];
let accepted = 0;
let received = 0;

const fail = (text) => {
  console.error(text);
  process.exit(1);
};

const connection = rhea.connect({ host, port: Number(port), reconnect: false });
connection.open_sender(`${topic}/kitchen/temp`); // the Kafka topic, and the key after the slash
connection.on("sendable", ({ sender }) => {
  while (unsent.length > 0 && sender.sendable()) {
    sender.send({ body: rhea.message.data_section(Buffer.from(unsent.shift())) }); // its bytes are the record's value
  }
});
connection.on("accepted", () => {
  // Every in-sync replica of Kafka has it.
  if (++accepted === readings.length) connection.open_receiver(`${topic}/group.id/amqp-rhea`);
});
connection.on("message", ({ message, connection: from }) => {
  console.log(message.message_annotations["x-opt-bridge.key"], message.body.content.toString());
  // rhea accepts it when this function returns, which advances the group's offset.
  if (++received === readings.length) from.close();
});
connection.on("rejected", ({ delivery }) => fail(`rejected: ${delivery.remote_state.error}`));
connection.on("connection_error", ({ error }) => fail(error.message));
connection.on("sender_error", ({ sender }) => fail(sender.error.description));
connection.on("receiver_error", ({ receiver }) => fail(receiver.error.description));
connection.on("disconnected", ({ error }) => error && fail(error.message));
