// Drives Azure's go-amqp by the line protocol of drivers.py: commands on standard input, answers and events on output.
package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"github.com/Azure/go-amqp"
)

const patience = 30 * time.Second

// Client is one connection with one session.
type Client struct {
	name      string
	conn      *amqp.Conn
	session   *amqp.Session
	senders   map[string]*amqp.Sender
	receivers map[string]*amqp.Receiver
	settled   map[string]bool
	held      map[int64]*amqp.Message
	number    int64
	closing   bool
	mutex     sync.Mutex
}

var output sync.Mutex

func say(line Fields) {
	output.Lock()
	defer output.Unlock()
	os.Stdout.Write(append(must(json.Marshal(line)), '\n'))
}

func text(fields Fields, name string) string {
	found, _ := fields[name].(string)
	return found
}

func flag(fields Fields, name string) bool {
	found, _ := fields[name].(bool)
	return found
}

func in(seconds time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), seconds)
	time.AfterFunc(seconds+time.Second, cancel)
	return ctx
}

func reason(err error) string {
	var remote *amqp.Error
	if errors.As(err, &remote) {
		return fmt.Sprintf("%s: %s", remote.Condition, remote.Description)
	}
	return fmt.Sprint(err)
}

func (client *Client) connect(command Fields) (Fields, error) {
	options := &amqp.ConnOptions{ContainerID: text(command, "container"), HostName: text(command, "host")}
	switch mechanism := text(command, "mechanism"); {
	case mechanism == "EXTERNAL":
		options.SASLType = amqp.SASLTypeExternal("")
	case mechanism == "ANONYMOUS":
		options.SASLType = amqp.SASLTypeAnonymous()
	case mechanism == "XOAUTH2":
		options.SASLType = amqp.SASLTypeXOAUTH2(text(command, "user"), text(command, "password"), 16384)
	case command["user"] != nil:
		options.SASLType = amqp.SASLTypePlain(text(command, "user"), text(command, "password"))
	}
	if command["idle_ms"] != nil {
		options.IdleTimeout = time.Duration(whole(command["idle_ms"])) * time.Millisecond
	}
	if command["frame_bytes"] != nil {
		options.MaxFrameSize = uint32(whole(command["frame_bytes"]))
	}
	scheme := "amqp"
	if files, is := command["tls"].(Fields); is {
		scheme = "amqps"
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(must(os.ReadFile(text(files, "ca"))))
		options.TLSConfig = &tls.Config{RootCAs: roots, ServerName: text(command, "host")}
		if files["cert"] != nil {
			pair := must(tls.LoadX509KeyPair(text(files, "cert"), text(files, "key")))
			options.TLSConfig.Certificates = []tls.Certificate{pair}
		}
	}
	address := fmt.Sprintf("%s://%s:%v", scheme, text(command, "host"), command["port"])
	conn, err := amqp.Dial(in(patience), address, options)
	if err != nil {
		return nil, err
	}
	session, err := conn.NewSession(in(patience), nil)
	if err != nil {
		return nil, err
	}
	client.mutex.Lock()
	defer client.mutex.Unlock()
	client.conn, client.session, client.closing = conn, session, false
	client.senders, client.receivers = map[string]*amqp.Sender{}, map[string]*amqp.Receiver{}
	client.settled, client.held = map[string]bool{}, map[int64]*amqp.Message{}
	go func() {
		<-conn.Done()
		client.mutex.Lock()
		defer client.mutex.Unlock()
		if !client.closing {
			say(Fields{"client": client.name, "event": "closed", "reason": reason(conn.Err())})
		}
	}()
	return Fields{}, nil
}

func (client *Client) attach(command Fields) (Fields, error) {
	link, address := text(command, "link"), text(command, "address")
	mode, second := amqp.SenderSettleModeUnsettled, amqp.ReceiverSettleModeSecond
	if flag(command, "settled") {
		mode = amqp.SenderSettleModeSettled
	} else if flag(command, "mixed") {
		mode = amqp.SenderSettleModeMixed
	}
	var capabilities []string
	named, _ := command["capabilities"].([]any)
	for _, name := range named {
		capabilities = append(capabilities, name.(string))
	}
	client.settled[link] = flag(command, "settled")
	if text(command, "role") == "sender" {
		options := &amqp.SenderOptions{
			Name: link, SettlementMode: &mode, DynamicAddress: flag(command, "dynamic"),
			TargetCapabilities: capabilities,
		}
		if flag(command, "second") {
			options.RequestedReceiverSettleMode = &second
		}
		sender, err := client.session.NewSender(in(patience), address, options)
		if err != nil {
			return nil, err
		}
		client.senders[link] = sender
		return Fields{"address": sender.Address()}, nil
	}
	options := &amqp.ReceiverOptions{
		Name: link, DynamicAddress: flag(command, "dynamic"), SourceCapabilities: capabilities,
		Credit: int32(whole(command["credit"])),
	}
	if flag(command, "settled") || flag(command, "mixed") {
		options.RequestedSenderSettleMode = &mode
	}
	if flag(command, "second") {
		options.SettlementMode = &second
	}
	if options.Credit == 0 {
		options.Credit = -1
	}
	if flag(command, "durable") {
		options.SourceDurability, options.SourceExpiryPolicy = amqp.DurabilityUnsettledState, amqp.ExpiryPolicyNever
	}
	if flag(command, "copy") {
		options.SourceDistributionMode = amqp.SourceDistributionModeCopy
	}
	filters, _ := command["filters"].([]any)
	for _, one := range filters {
		name, value := one.([]any)[0].(string), toLibrary(one.([]any)[1])
		if name == "apache.org:selector-filter:string" {
			options.Filters = append(options.Filters, amqp.NewSelectorFilter(value.(string)))
		} else {
			options.Filters = append(options.Filters, amqp.NewLinkFilter(name, 0, value))
		}
	}
	receiver, err := client.session.NewReceiver(in(patience), address, options)
	if err != nil {
		return nil, err
	}
	client.receivers[link] = receiver
	applied := []string{}
	for _, one := range filters {
		if name := one.([]any)[0].(string); receiver.LinkSourceFilterValue(name) != nil {
			applied = append(applied, name)
		}
	}
	return Fields{"address": receiver.Address(), "filters": applied}, nil
}

func (client *Client) send(command Fields) (Fields, error) {
	link := text(command, "link")
	sender := client.senders[link]
	outcomes := []Fields{}
	receipts := []amqp.SendReceipt{}
	for _, one := range command["messages"].([]any) {
		if client.settled[link] {
			if err := sender.Send(in(patience), toMessage(one.(Fields)), nil); err != nil {
				return nil, err
			}
			continue
		}
		receipt, err := sender.SendWithReceipt(in(patience), toMessage(one.(Fields)), nil)
		if err != nil {
			return nil, err
		}
		receipts = append(receipts, receipt)
	}
	for _, receipt := range receipts {
		state, err := receipt.Wait(in(patience))
		if err != nil {
			return nil, err
		}
		switch state := state.(type) {
		case *amqp.StateAccepted:
			outcomes = append(outcomes, Fields{"name": "accepted"})
		case *amqp.StateReleased:
			outcomes = append(outcomes, Fields{"name": "released"})
		case *amqp.StateModified:
			outcomes = append(outcomes, Fields{"name": "modified"})
		case *amqp.StateRejected:
			fields := Fields{"name": "rejected"}
			if state.Error != nil {
				fields["condition"], fields["description"] = state.Error.Condition, state.Error.Description
			}
			outcomes = append(outcomes, fields)
		}
	}
	return Fields{"outcomes": outcomes}, nil
}

func (client *Client) receive(command Fields) (Fields, error) {
	receiver := client.receivers[text(command, "link")]
	messages := []Fields{}
	ctx := in(time.Duration(whole(command["seconds"])) * time.Second)
	for int64(len(messages)) < whole(command["count"]) {
		message, err := receiver.Receive(ctx, nil)
		if errors.Is(err, context.DeadlineExceeded) {
			break
		}
		if err != nil {
			return nil, err
		}
		client.number++
		client.held[client.number] = message
		fields := fromMessage(message)
		fields["delivery"] = client.number
		messages = append(messages, fields)
	}
	return Fields{"messages": messages}, nil
}

func (client *Client) settle(command Fields) (Fields, error) {
	receiver := client.receivers[text(command, "link")]
	for _, number := range command["deliveries"].([]any) {
		message := client.held[whole(number)]
		delete(client.held, whole(number))
		var err error
		switch text(command, "outcome") {
		case "accepted":
			err = receiver.AcceptMessage(in(patience), message)
		case "released":
			err = receiver.ReleaseMessage(in(patience), message)
		case "rejected":
			var given *amqp.Error
			if condition := text(command, "condition"); condition != "" {
				given = &amqp.Error{Condition: amqp.ErrCond(condition), Description: "no"}
			}
			err = receiver.RejectMessage(in(patience), message, given)
		default:
			options := &amqp.ModifyMessageOptions{
				DeliveryFailed: flag(command, "failed"), UndeliverableHere: flag(command, "undeliverable"),
			}
			err = receiver.ModifyMessage(in(patience), message, options)
		}
		if err != nil {
			return nil, err
		}
	}
	return Fields{}, nil
}

func (client *Client) credit(command Fields) (Fields, error) {
	return Fields{}, client.receivers[text(command, "link")].IssueCredit(uint32(whole(command["count"])))
}

func (client *Client) drain(command Fields) (Fields, error) {
	return Fields{}, client.receivers[text(command, "link")].DrainCredit(in(patience), nil)
}

func (client *Client) detach(command Fields) (Fields, error) {
	if !flag(command, "close") {
		return nil, errors.New("go-amqp always closes a link")
	}
	if sender, is := client.senders[text(command, "link")]; is {
		return Fields{}, sender.Close(in(patience))
	}
	return Fields{}, client.receivers[text(command, "link")].Close(in(patience))
}

func (client *Client) close(Fields) (Fields, error) {
	client.mutex.Lock()
	client.closing = true
	client.mutex.Unlock()
	if client.conn != nil {
		client.conn.Close() // an error only repeats why the connection ended before
	}
	return Fields{}, nil
}

func (client *Client) answer(command Fields) {
	verbs := map[string]func(Fields) (Fields, error){
		"connect": client.connect, "attach": client.attach, "send": client.send, "receive": client.receive,
		"settle": client.settle, "credit": client.credit, "drain": client.drain, "detach": client.detach,
		"close": client.close, "release": client.close,
	}
	defer func() {
		if panicked := recover(); panicked != nil {
			say(Fields{"n": command["n"], "error": fmt.Sprint(panicked)})
		}
	}()
	result, err := verbs[text(command, "do")](command)
	if err != nil {
		say(Fields{"n": command["n"], "error": reason(err)})
	} else {
		say(Fields{"n": command["n"], "result": result})
	}
}

func version() string {
	info, _ := debug.ReadBuildInfo()
	for _, module := range info.Deps {
		if module.Path == "github.com/Azure/go-amqp" {
			return module.Version
		}
	}
	return "unknown"
}

func main() {
	say(Fields{"event": "ready", "name": "go-amqp", "version": version()})
	clients := map[string]*Client{}
	lines := bufio.NewReaderSize(os.Stdin, 1<<24)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return
		}
		decoder := json.NewDecoder(bytes.NewReader(line))
		decoder.UseNumber()
		command := Fields{}
		if err := decoder.Decode(&command); err != nil {
			panic(err)
		}
		name := text(command, "client")
		if clients[name] == nil {
			clients[name] = &Client{name: name}
		}
		go clients[name].answer(command)
	}
}
