//! Values and messages of the line protocol as fe2o3-amqp has them, and back.

use base64::prelude::{Engine, BASE64_STANDARD};
use fe2o3_amqp::types::messaging::annotations::{Annotations, OwnedKey};
use fe2o3_amqp::types::messaging::{
    AmqpSequence, AmqpValue, ApplicationProperties, Body, Data, Header, Message, MessageAnnotations, MessageId,
    Priority, Properties,
};
use fe2o3_amqp::types::primitives::{OrderedMap, SimpleValue, Symbol, Timestamp, Uuid, Value};
use serde_bytes::ByteBuf;
use serde_json::{json, Map, Value as Fields};

pub fn bytes(fields: &Fields) -> ByteBuf {
    ByteBuf::from(BASE64_STANDARD.decode(fields.as_str().unwrap()).unwrap())
}

fn base64(data: &[u8]) -> String {
    BASE64_STANDARD.encode(data)
}

fn uuid(fields: &Fields) -> Uuid {
    let digits: String = fields.as_str().unwrap().replace('-', "");
    let mut out = [0; 16];
    for (at, byte) in out.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).unwrap();
    }
    Uuid::from(out)
}

fn tagged(tag: &str, fields: &Fields) -> Option<Value> {
    Some(match tag {
        "@binary" => Value::Binary(bytes(fields)),
        "@uuid" => Value::Uuid(uuid(fields)),
        "@symbol" => Value::Symbol(Symbol::from(fields.as_str().unwrap())),
        "@timestamp" => Value::Timestamp(Timestamp::from(fields.as_i64().unwrap())),
        "@ulong" => Value::Ulong(fields.as_u64().unwrap()),
        "@uint" => Value::Uint(fields.as_u64().unwrap() as u32),
        "@int" => Value::Int(fields.as_i64().unwrap() as i32),
        _ => return None,
    })
}

pub fn to_library(fields: &Fields) -> Value {
    match fields {
        Fields::Null => Value::Null,
        Fields::Bool(flag) => Value::Bool(*flag),
        Fields::Number(number) => match number.as_i64() {
            Some(whole) => Value::Long(whole),
            None => Value::Double(number.as_f64().unwrap().into()),
        },
        Fields::String(text) => Value::String(text.clone()),
        Fields::Array(list) => Value::List(list.iter().map(to_library).collect()),
        Fields::Object(map) => {
            if let Some(value) = map.iter().next().and_then(|(tag, content)| tagged(tag, content)) {
                return value;
            }
            let mut out = OrderedMap::new();
            for (key, one) in map {
                out.insert(Value::String(key.clone()), to_library(one));
            }
            Value::Map(out)
        }
    }
}

pub fn from_library(value: &Value) -> Fields {
    match value {
        Value::Bool(flag) => json!(flag),
        Value::Ubyte(number) => json!(number),
        Value::Ushort(number) => json!(number),
        Value::Uint(number) => json!({ "@uint": number }),
        Value::Ulong(number) => json!({ "@ulong": number }),
        Value::Byte(number) => json!(number),
        Value::Short(number) => json!(number),
        Value::Int(number) => json!({ "@int": number }),
        Value::Long(number) => json!(number),
        Value::Float(number) => json!(number.0),
        Value::Double(number) => json!(number.0),
        Value::Timestamp(at) => json!({ "@timestamp": at.milliseconds() }),
        Value::Uuid(id) => json!({ "@uuid": hyphened(id.as_inner()) }),
        Value::Binary(data) => json!({ "@binary": base64(data) }),
        Value::String(text) => json!(text),
        Value::Symbol(text) => json!({ "@symbol": text.as_str() }),
        Value::List(list) => list.iter().map(from_library).collect(),
        Value::Map(map) => {
            let mut out = Map::new();
            for (key, one) in map.iter() {
                out.insert(from_library(key).as_str().unwrap_or_default().to_owned(), from_library(one));
            }
            Fields::Object(out)
        }
        _ => Fields::Null,
    }
}

fn hyphened(id: &[u8; 16]) -> String {
    let digits: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]].join("-")
}

fn to_id(fields: &Fields) -> Option<MessageId> {
    match to_library(fields) {
        Value::String(text) => Some(MessageId::String(text)),
        Value::Ulong(number) => Some(MessageId::Ulong(number)),
        Value::Uuid(id) => Some(MessageId::Uuid(id)),
        Value::Binary(data) => Some(MessageId::Binary(data)),
        _ => None,
    }
}

fn from_id(id: &Option<MessageId>) -> Fields {
    match id {
        Some(MessageId::String(text)) => json!(text),
        Some(MessageId::Ulong(number)) => json!({ "@ulong": number }),
        Some(MessageId::Uuid(id)) => json!({ "@uuid": hyphened(id.as_inner()) }),
        Some(MessageId::Binary(data)) => json!({ "@binary": base64(data) }),
        None => Fields::Null,
    }
}

fn text(fields: &Fields, name: &str) -> Option<String> {
    fields[name].as_str().map(str::to_owned)
}

pub fn to_message(fields: &Fields) -> Message<Body<Value>> {
    let properties = Properties {
        message_id: to_id(&fields["id"]),
        user_id: fields["user_id"].get("@binary").map(bytes),
        to: text(fields, "to"),
        subject: text(fields, "subject"),
        reply_to: text(fields, "reply_to"),
        correlation_id: to_id(&fields["correlation_id"]),
        content_type: text(fields, "content_type").map(Symbol::from),
        content_encoding: text(fields, "content_encoding").map(Symbol::from),
        absolute_expiry_time: fields["expiry"].as_i64().map(Timestamp::from),
        creation_time: fields["creation"].as_i64().map(Timestamp::from),
        group_id: text(fields, "group_id"),
        group_sequence: fields["group_sequence"].as_u64().map(|number| number as u32),
        reply_to_group_id: text(fields, "reply_to_group_id"),
    };
    let header = Header {
        durable: fields["durable"].as_bool().unwrap_or_default(),
        priority: Priority(fields["priority"].as_u64().unwrap_or(4) as u8),
        ttl: fields["ttl"].as_u64().map(|ms| ms as u32),
        ..Header::default()
    };
    let mut annotations = Annotations::new();
    for (key, one) in fields["annotations"].as_object().into_iter().flatten() {
        annotations.insert(OwnedKey::Symbol(Symbol::from(key.as_str())), to_library(one));
    }
    let mut application = OrderedMap::new();
    for (key, one) in fields["application"].as_object().into_iter().flatten() {
        application.insert(key.clone(), SimpleValue::try_from(to_library(one)).unwrap());
    }
    let body = if let Some(sections) = fields["data"].as_array() {
        Body::Data(sections.iter().map(|one| Data(bytes(one))).collect::<Vec<_>>().into())
    } else if let Some(lists) = fields["sequences"].as_array() {
        let lists = lists.iter().map(|one| AmqpSequence(one.as_array().unwrap().iter().map(to_library).collect()));
        Body::Sequence(lists.collect::<Vec<_>>().into())
    } else {
        Body::Value(AmqpValue(to_library(&fields["value"])))
    };
    Message {
        header: Some(header),
        delivery_annotations: None,
        message_annotations: Some(MessageAnnotations(annotations)),
        properties: Some(properties),
        application_properties: Some(ApplicationProperties(application)),
        body,
        footer: None,
    }
}

pub fn from_message(seen: &Message<Body<Value>>) -> Fields {
    let header = seen.header.clone().unwrap_or_default();
    let own = seen.properties.clone().unwrap_or_default();
    let mut annotations = Map::new();
    for (key, one) in seen.message_annotations.iter().flat_map(|found| found.0.iter()) {
        if let OwnedKey::Symbol(name) = key {
            annotations.insert(name.to_string(), from_library(one));
        }
    }
    let mut application = Map::new();
    for (key, one) in seen.application_properties.iter().flat_map(|found| found.0.iter()) {
        application.insert(key.clone(), from_library(&Value::from(one.clone())));
    }
    let mut fields = json!({
        "durable": header.durable,
        "priority": header.priority.0,
        "ttl": header.ttl,
        "delivery_count": header.delivery_count,
        "id": from_id(&own.message_id),
        "correlation_id": from_id(&own.correlation_id),
        "user_id": own.user_id.map(|data| json!({ "@binary": base64(&data) })),
        "to": own.to,
        "subject": own.subject,
        "reply_to": own.reply_to,
        "content_type": own.content_type.map(|one| one.to_string()),
        "content_encoding": own.content_encoding.map(|one| one.to_string()),
        "expiry": own.absolute_expiry_time.map(|at| at.milliseconds()),
        "creation": own.creation_time.map(|at| at.milliseconds()),
        "group_id": own.group_id,
        "group_sequence": own.group_sequence,
        "reply_to_group_id": own.reply_to_group_id,
        "annotations": annotations,
        "application": application,
    });
    match &seen.body {
        Body::Data(sections) => fields["data"] = sections.iter().map(|one| json!(base64(&one.0))).collect(),
        Body::Sequence(lists) => {
            fields["sequences"] = lists.iter().map(|one| one.0.iter().map(from_library).collect::<Fields>()).collect()
        }
        Body::Value(value) => fields["value"] = from_library(&value.0),
        Body::Empty => {}
    }
    fields
}
