package main

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/Azure/go-amqp"
)

// Told is a value, a message or a command as the line protocol has it.
type Told = map[string]any

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func bytesOf(text any) []byte { return must(base64.StdEncoding.DecodeString(text.(string))) }
func whole(number any) int64  { return must(number.(json.Number).Int64()) }

func tagged(tag string, content any) (any, bool) {
	switch tag {
	case "@binary":
		return bytesOf(content), true
	case "@uuid":
		var id amqp.UUID
		copy(id[:], must(hex.DecodeString(strings.ReplaceAll(content.(string), "-", ""))))
		return id, true
	case "@symbol":
		return amqp.Symbol(content.(string)), true
	case "@timestamp":
		return time.UnixMilli(whole(content)), true
	case "@ulong":
		return uint64(whole(content)), true
	case "@uint":
		return uint32(whole(content)), true
	case "@int":
		return int32(whole(content)), true
	}
	return nil, false
}

func toLibrary(told any) any {
	switch told := told.(type) {
	case json.Number:
		if number, err := told.Int64(); err == nil {
			return number
		}
		return must(told.Float64())
	case []any:
		out := make([]any, len(told))
		for at, one := range told {
			out[at] = toLibrary(one)
		}
		return out
	case Told:
		out := map[string]any{}
		for key, one := range told {
			if value, is := tagged(key, one); is {
				return value
			}
			out[key] = toLibrary(one)
		}
		return out
	}
	return told
}

func fromLibrary(value any) any {
	switch value := value.(type) {
	case []byte:
		return Told{"@binary": base64.StdEncoding.EncodeToString(value)}
	case amqp.UUID:
		return Told{"@uuid": value.String()}
	case amqp.Symbol:
		return Told{"@symbol": string(value)}
	case time.Time:
		return Told{"@timestamp": value.UnixMilli()}
	case uint64:
		return Told{"@ulong": value}
	case uint32:
		return Told{"@uint": value}
	case int32:
		return Told{"@int": value}
	case amqp.Null:
		return nil
	case []any:
		out := make([]any, len(value))
		for at, one := range value {
			out[at] = fromLibrary(one)
		}
		return out
	case map[string]any:
		out := Told{}
		for key, one := range value {
			out[key] = fromLibrary(one)
		}
		return out
	case map[any]any:
		out := Told{}
		for key, one := range value {
			out[fmt.Sprint(key)] = fromLibrary(one)
		}
		return out
	}
	return value
}

func stringOf(told Told, name string) *string {
	if text, is := told[name].(string); is {
		return &text
	}
	return nil
}

func timeOf(told Told, name string) *time.Time {
	if told[name] == nil {
		return nil
	}
	at := time.UnixMilli(whole(told[name]))
	return &at
}

func toMessage(told Told) *amqp.Message {
	properties := &amqp.MessageProperties{
		MessageID: toLibrary(told["id"]), CorrelationID: toLibrary(told["correlation_id"]),
		To: stringOf(told, "to"), Subject: stringOf(told, "subject"), ReplyTo: stringOf(told, "reply_to"),
		ContentType: stringOf(told, "content_type"), ContentEncoding: stringOf(told, "content_encoding"),
		GroupID: stringOf(told, "group_id"), ReplyToGroupID: stringOf(told, "reply_to_group_id"),
		AbsoluteExpiryTime: timeOf(told, "expiry"), CreationTime: timeOf(told, "creation"),
	}
	if told["user_id"] != nil {
		properties.UserID = toLibrary(told["user_id"]).([]byte)
	}
	if told["group_sequence"] != nil {
		sequence := uint32(whole(told["group_sequence"]))
		properties.GroupSequence = &sequence
	}
	out := &amqp.Message{Properties: properties}
	if told["durable"] != nil || told["priority"] != nil || told["ttl"] != nil {
		out.Header = &amqp.MessageHeader{Priority: 4}
		out.Header.Durable, _ = told["durable"].(bool)
		if told["priority"] != nil {
			out.Header.Priority = uint8(whole(told["priority"]))
		}
		if told["ttl"] != nil {
			out.Header.TTL = time.Duration(whole(told["ttl"])) * time.Millisecond
		}
	}
	if annotations, is := told["annotations"].(Told); is {
		out.Annotations = amqp.Annotations{}
		for key, one := range annotations {
			out.Annotations[key] = toLibrary(one)
		}
	}
	if application, is := told["application"].(Told); is {
		out.ApplicationProperties = toLibrary(application).(map[string]any)
	}
	if value, is := told["value"]; is {
		if out.Value = toLibrary(value); value == nil {
			out.Value = amqp.Null{}
		}
	} else if sequences, is := told["sequences"].([]any); is {
		for _, one := range sequences {
			out.Sequence = append(out.Sequence, toLibrary(one).([]any))
		}
	} else {
		for _, one := range told["data"].([]any) {
			out.Data = append(out.Data, bytesOf(one))
		}
	}
	return out
}

func fromMessage(seen *amqp.Message) Told {
	told := Told{"delivery_count": 0, "annotations": Told{}, "application": Told{}}
	if seen.Header != nil {
		told["durable"], told["priority"] = seen.Header.Durable, seen.Header.Priority
		told["ttl"], told["delivery_count"] = seen.Header.TTL.Milliseconds(), seen.Header.DeliveryCount
	}
	if own := seen.Properties; own != nil {
		told["id"], told["correlation_id"] = fromLibrary(own.MessageID), fromLibrary(own.CorrelationID)
		told["to"], told["subject"], told["reply_to"] = own.To, own.Subject, own.ReplyTo
		told["content_type"], told["content_encoding"] = own.ContentType, own.ContentEncoding
		told["group_id"], told["group_sequence"] = own.GroupID, own.GroupSequence
		told["reply_to_group_id"] = own.ReplyToGroupID
		if own.UserID != nil {
			told["user_id"] = fromLibrary(own.UserID)
		}
		if own.AbsoluteExpiryTime != nil {
			told["expiry"] = own.AbsoluteExpiryTime.UnixMilli()
		}
		if own.CreationTime != nil {
			told["creation"] = own.CreationTime.UnixMilli()
		}
	}
	for key, one := range seen.Annotations {
		told["annotations"].(Told)[fmt.Sprint(key)] = fromLibrary(one)
	}
	for key, one := range seen.ApplicationProperties {
		told["application"].(Told)[key] = fromLibrary(one)
	}
	if seen.Data != nil {
		sections := []string{}
		for _, one := range seen.Data {
			sections = append(sections, base64.StdEncoding.EncodeToString(one))
		}
		told["data"] = sections
	} else if seen.Sequence != nil {
		lists := []any{}
		for _, one := range seen.Sequence {
			lists = append(lists, fromLibrary(one))
		}
		told["sequences"] = lists
	} else {
		told["value"] = fromLibrary(seen.Value)
	}
	return told
}
