// AMQP 1.0 with Azure's go-amqp: send three readings, receive them as a member of a consumer group, accept them.
// cd tests/interop/amqp/go && go run ../../../../examples/amqp_go.go [HOST:PORT] [TOPIC]
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/Azure/go-amqp"
)

func argument(place int, otherwise string) string {
	if len(os.Args) > place {
		return os.Args[place]
	}
	return otherwise
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	address, topic := argument(1, "127.0.0.1:5672"), argument(2, "house")
	readings := []string{"21.5", "21.7", "21.6"}
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	connection, err := amqp.Dial(ctx, "amqp://"+address, &amqp.ConnOptions{SASLType: amqp.SASLTypeAnonymous()})
	check(err)
	defer connection.Close()
	session, err := connection.NewSession(ctx, nil)
	check(err)
	// The Kafka topic, and the key after the slash.
	sender, err := session.NewSender(ctx, topic+"/kitchen/temp", nil)
	check(err)
	for _, reading := range readings {
		// Returns on `accepted`: every in-sync replica of Kafka has it.
		check(sender.Send(ctx, amqp.NewMessage([]byte(reading)), nil))
	}
	receiver, err := session.NewReceiver(ctx, topic+"/group.id/amqp-go", nil)
	check(err)
	for range readings {
		message, err := receiver.Receive(ctx, nil)
		check(err)
		fmt.Println(message.Annotations["x-opt-bridge.key"], string(message.GetData()))
		check(receiver.AcceptMessage(ctx, message)) // advances the group's offset
	}
}
