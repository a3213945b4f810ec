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

// Fields is a value, a message or a command in the line protocol.
type Fields = map[string]any

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

func toLibrary(fields any) any {
	switch fields := fields.(type) {
	case json.Number:
		if number, err := fields.Int64(); err == nil {
			return number
		}
		return must(fields.Float64())
	case []any:
		out := make([]any, len(fields))
		for at, one := range fields {
			out[at] = toLibrary(one)
		}
		return out
	case Fields:
		out := map[string]any{}
		for key, one := range fields {
			if value, is := tagged(key, one); is {
				return value
			}
			out[key] = toLibrary(one)
		}
		return out
	}
	return fields
}

func fromLibrary(value any) any {
	switch value := value.(type) {
	case []byte:
		return Fields{"@binary": base64.StdEncoding.EncodeToString(value)}
	case amqp.UUID:
		return Fields{"@uuid": value.String()}
	case amqp.Symbol:
		return Fields{"@symbol": string(value)}
	case time.Time:
		return Fields{"@timestamp": value.UnixMilli()}
	case uint64:
		return Fields{"@ulong": value}
	case uint32:
		return Fields{"@uint": value}
	case int32:
		return Fields{"@int": value}
	case amqp.Null:
		return nil
	case []any:
		out := make([]any, len(value))
		for at, one := range value {
			out[at] = fromLibrary(one)
		}
		return out
	case map[string]any:
		out := Fields{}
		for key, one := range value {
			out[key] = fromLibrary(one)
		}
		return out
	case map[any]any:
		out := Fields{}
		for key, one := range value {
			out[fmt.Sprint(key)] = fromLibrary(one)
		}
		return out
	}
	return value
}

func stringOf(fields Fields, name string) *string {
	if text, is := fields[name].(string); is {
		return &text
	}
	return nil
}

func timeOf(fields Fields, name string) *time.Time {
	if fields[name] == nil {
		return nil
	}
	at := time.UnixMilli(whole(fields[name]))
	return &at
}

func toMessage(fields Fields) *amqp.Message {
	properties := &amqp.MessageProperties{
		MessageID: toLibrary(fields["id"]), CorrelationID: toLibrary(fields["correlation_id"]),
		To: stringOf(fields, "to"), Subject: stringOf(fields, "subject"), ReplyTo: stringOf(fields, "reply_to"),
		ContentType: stringOf(fields, "content_type"), ContentEncoding: stringOf(fields, "content_encoding"),
		GroupID: stringOf(fields, "group_id"), ReplyToGroupID: stringOf(fields, "reply_to_group_id"),
		AbsoluteExpiryTime: timeOf(fields, "expiry"), CreationTime: timeOf(fields, "creation"),
	}
	if fields["user_id"] != nil {
		properties.UserID = toLibrary(fields["user_id"]).([]byte)
	}
	if fields["group_sequence"] != nil {
		sequence := uint32(whole(fields["group_sequence"]))
		properties.GroupSequence = &sequence
	}
	out := &amqp.Message{Properties: properties}
	if fields["durable"] != nil || fields["priority"] != nil || fields["ttl"] != nil {
		out.Header = &amqp.MessageHeader{Priority: 4}
		out.Header.Durable, _ = fields["durable"].(bool)
		if fields["priority"] != nil {
			out.Header.Priority = uint8(whole(fields["priority"]))
		}
		if fields["ttl"] != nil {
			out.Header.TTL = time.Duration(whole(fields["ttl"])) * time.Millisecond
		}
	}
	if annotations, is := fields["annotations"].(Fields); is {
		out.Annotations = amqp.Annotations{}
		for key, one := range annotations {
			out.Annotations[key] = toLibrary(one)
		}
	}
	if application, is := fields["application"].(Fields); is {
		out.ApplicationProperties = toLibrary(application).(map[string]any)
	}
	if value, is := fields["value"]; is {
		if out.Value = toLibrary(value); value == nil {
			out.Value = amqp.Null{}
		}
	} else if sequences, is := fields["sequences"].([]any); is {
		for _, one := range sequences {
			out.Sequence = append(out.Sequence, toLibrary(one).([]any))
		}
	} else {
		for _, one := range fields["data"].([]any) {
			out.Data = append(out.Data, bytesOf(one))
		}
	}
	return out
}

func fromMessage(seen *amqp.Message) Fields {
	fields := Fields{"delivery_count": 0, "annotations": Fields{}, "application": Fields{}}
	if seen.Header != nil {
		fields["durable"], fields["priority"] = seen.Header.Durable, seen.Header.Priority
		fields["ttl"], fields["delivery_count"] = seen.Header.TTL.Milliseconds(), seen.Header.DeliveryCount
	}
	if own := seen.Properties; own != nil {
		fields["id"], fields["correlation_id"] = fromLibrary(own.MessageID), fromLibrary(own.CorrelationID)
		fields["to"], fields["subject"], fields["reply_to"] = own.To, own.Subject, own.ReplyTo
		fields["content_type"], fields["content_encoding"] = own.ContentType, own.ContentEncoding
		fields["group_id"], fields["group_sequence"] = own.GroupID, own.GroupSequence
		fields["reply_to_group_id"] = own.ReplyToGroupID
		if own.UserID != nil {
			fields["user_id"] = fromLibrary(own.UserID)
		}
		if own.AbsoluteExpiryTime != nil {
			fields["expiry"] = own.AbsoluteExpiryTime.UnixMilli()
		}
		if own.CreationTime != nil {
			fields["creation"] = own.CreationTime.UnixMilli()
		}
	}
	for key, one := range seen.Annotations {
		fields["annotations"].(Fields)[fmt.Sprint(key)] = fromLibrary(one)
	}
	for key, one := range seen.ApplicationProperties {
		fields["application"].(Fields)[key] = fromLibrary(one)
	}
	if seen.Data != nil {
		sections := []string{}
		for _, one := range seen.Data {
			sections = append(sections, base64.StdEncoding.EncodeToString(one))
		}
		fields["data"] = sections
	} else if seen.Sequence != nil {
		lists := []any{}
		for _, one := range seen.Sequence {
			lists = append(lists, fromLibrary(one))
		}
		fields["sequences"] = lists
	} else {
		fields["value"] = fromLibrary(seen.Value)
	}
	return fields
}
