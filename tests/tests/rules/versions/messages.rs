//! The messages, enums and services of proto/, as they were recorded, and as the .proto files define them now.

use super::Recording;
use prost::Message as _;
use protox::prost_reflect::{
    DescriptorPool, DynamicMessage, EnumDescriptor, FieldDescriptor, Kind, MapKey, MessageDescriptor, MethodDescriptor, Value,
};
use serde_json::{Map, Value as Json, json};
use std::{collections::BTreeSet, path::Path};

/// Compiles the .proto files of a folder. Their names are relative to it.
pub(super) fn compiled(folder: &Path, files: &[String]) -> DescriptorPool {
    let set = protox::compile(files, [folder]).expect("the .proto files are valid");
    DescriptorPool::from_file_descriptor_set(set).expect("the compiler's output is valid")
}

/// Returns the differences between the recordings and the descriptors that other versions would not understand.
pub(super) fn differences(pool: &DescriptorPool, recorded: &[Recording]) -> Vec<String> {
    recorded.iter().filter_map(|recording| difference(pool, recording).err()).collect()
}

fn difference(pool: &DescriptorPool, recording: &Recording) -> Result<(), String> {
    match recording {
        Recording::Message { message, bytes, fields } => {
            let descriptor = pool.get_message_by_name(message).ok_or(format!("{message} is missing"))?;
            let decoded = DynamicMessage::decode(descriptor, &*unhex(bytes))
                .map_err(|error| format!("{message} cannot be decoded: {error}"))?;
            kept(message, fields, &shown(&decoded))
        }
        Recording::Enum { name, values } => {
            let now = pool.get_enum_by_name(name).map_or(Json::Null, |descriptor| numbers(&descriptor));
            kept(name, values, &now)
        }
        Recording::Service { service, methods } => {
            let descriptor = pool.services().find(|descriptor| descriptor.full_name() == service);
            let now = descriptor.map_or(Json::Null, |descriptor| signatures(descriptor.methods()));
            kept(service, methods, &now)
        }
        Recording::Line { .. } => Ok(()),
    }
}

/// Checks that `now` still has everything that was recorded. It may have more.
pub(super) fn kept(name: &str, recorded: &Json, now: &Json) -> Result<(), String> {
    match (recorded, now) {
        (Json::Object(recorded), Json::Object(now)) => recorded.iter().try_for_each(|(key, value)| {
            let now =
                now.get(key).ok_or_else(|| format!("{name} had {key:?}, and has {:?} now", now.keys().collect::<Vec<_>>()))?;
            kept(&format!("{name} / {key}"), value, now)
        }),
        (Json::Array(recorded), Json::Array(now)) if recorded.len() == now.len() => {
            recorded.iter().zip(now).try_for_each(|(recorded, now)| kept(name, recorded, now))
        }
        (recorded, now) if recorded == now => Ok(()),
        (recorded, now) => Err(format!("{name} was {recorded}, and is {now} now")),
    }
}

/// Returns recordings of what no recording has yet: messages and their fields, values of enums, and methods.
pub(super) fn missing(pool: &DescriptorPool, recorded: &[Recording]) -> Vec<Recording> {
    let known = known(recorded);
    let is_new = |name: &str, part: String| !known.contains(&(name.to_owned(), part));
    let mut new = Vec::new();
    for message in pool.all_messages().filter(|message| !message.is_map_entry()) {
        let name = message.full_name();
        let variants = message.oneofs().map(|oneof| oneof.fields().len()).max().unwrap_or(1);
        for variant in 0..variants {
            let example = example(&message, variant);
            let fields = shown(&example);
            let mut parts = fields.as_object().into_iter().flat_map(Map::keys);
            if parts.any(|field| is_new(name, field.clone())) || is_new(name, String::new()) && message.fields().len() == 0 {
                new.push(Recording::Message { message: name.to_owned(), bytes: hex(&example.encode_to_vec()), fields });
            }
        }
    }
    for descriptor in pool.all_enums() {
        let (name, values) = (descriptor.full_name().to_owned(), numbers(&descriptor));
        if values.as_object().into_iter().flat_map(Map::keys).any(|number| is_new(&name, number.clone())) {
            new.push(Recording::Enum { name, values });
        }
    }
    for descriptor in pool.services() {
        let (service, methods) = (descriptor.full_name().to_owned(), signatures(descriptor.methods()));
        if methods.as_object().into_iter().flat_map(Map::keys).any(|method| is_new(&service, method.clone())) {
            new.push(Recording::Service { service, methods });
        }
    }
    new
}

/// The recorded parts of each message, enum and service. Everything has the empty part as well.
fn known(recorded: &[Recording]) -> BTreeSet<(String, String)> {
    let parts = recorded.iter().flat_map(|recording| {
        let (name, parts) = match recording {
            Recording::Message { message, fields, .. } => (message, fields),
            Recording::Enum { name, values } => (name, values),
            Recording::Service { service, methods } => (service, methods),
            Recording::Line { line, value } => (line, value),
        };
        let parts = parts.as_object().into_iter().flat_map(Map::keys).cloned().chain([String::new()]);
        parts.map(|part| (name.clone(), part))
    });
    parts.collect()
}

/// Returns an example of the message with all of its fields, and one field of each `oneof`.
fn example(message: &MessageDescriptor, variant: usize) -> DynamicMessage {
    let mut filled = DynamicMessage::new(message.clone());
    for field in message.fields() {
        let chosen = field
            .containing_oneof()
            .is_none_or(|oneof| oneof.fields().nth(variant % oneof.fields().len()) == Some(field.clone()));
        if chosen {
            let value = match field.kind() {
                Kind::Message(entry) if field.is_map() => {
                    let value = single(&entry.map_entry_value_field(), 1);
                    let key = match entry.map_entry_key_field().kind() {
                        Kind::String => MapKey::String(format!("key of {}", field.name())),
                        _ => MapKey::U32(1_000 + field.number()),
                    };
                    Value::Map([(key, value)].into())
                }
                _ if field.is_list() => Value::List(vec![single(&field, 1), single(&field, 2)]),
                _ => single(&field, 1),
            };
            filled.set_field(&field, value);
        }
    }
    filled
}

/// Returns a value that differs from those of the message's other fields, and that a smaller type could not hold.
fn single(field: &FieldDescriptor, nth: u32) -> Value {
    let number = 10 * field.number() + nth;
    match field.kind() {
        Kind::Double => Value::F64(f64::from(number) + 0.125),
        Kind::Float => Value::F32(number as f32 + 0.5),
        Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => Value::I32(-(number as i32)),
        Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => Value::I64(i64::MIN + i64::from(number)),
        Kind::Uint32 | Kind::Fixed32 => Value::U32(u32::MAX - number),
        Kind::Uint64 | Kind::Fixed64 => Value::U64(u64::MAX - u64::from(number)),
        Kind::Bool => Value::Bool(true),
        Kind::String => Value::String(format!("{} {nth}", field.name())),
        Kind::Bytes => Value::Bytes(vec![0, 0xff, number as u8].into()),
        Kind::Enum(descriptor) => Value::EnumNumber(descriptor.values().last().expect("an enum has values").number()),
        Kind::Message(message) => Value::Message(example(&message, 0)),
    }
}

/// Returns the fields that are set, by their numbers, names and types.
pub(super) fn shown(message: &DynamicMessage) -> Json {
    let shown = message.fields().map(|(field, value)| {
        let presence = match field.containing_oneof() {
            _ if field.is_list() => "repeated ",
            Some(oneof) if !oneof.is_synthetic() => "oneof ",
            _ if field.supports_presence() && !matches!(field.kind(), Kind::Message(_)) => "optional ",
            _ => "",
        };
        (format!("{} {} {presence}{}", field.number(), field.name(), type_name(&field)), json_of(value))
    });
    Json::Object(shown.collect())
}

fn type_name(field: &FieldDescriptor) -> String {
    match field.kind() {
        Kind::Message(entry) if field.is_map() => {
            format!("map<{}, {}>", type_name(&entry.map_entry_key_field()), type_name(&entry.map_entry_value_field()))
        }
        Kind::Message(message) => message.full_name().to_owned(),
        Kind::Enum(descriptor) => descriptor.full_name().to_owned(),
        scalar => format!("{scalar:?}").to_lowercase(),
    }
}

fn json_of(value: &Value) -> Json {
    match value {
        Value::Bool(value) => json!(value),
        Value::I32(value) => json!(value),
        Value::I64(value) => json!(value),
        Value::U32(value) => json!(value),
        Value::U64(value) => json!(value),
        Value::F32(value) => json!(f64::from(*value)),
        Value::F64(value) => json!(value),
        Value::String(value) => json!(value),
        Value::Bytes(value) => json!(hex(value)),
        Value::EnumNumber(number) => json!(number),
        Value::Message(message) => shown(message),
        Value::List(values) => values.iter().map(json_of).collect(),
        Value::Map(entries) => entries.iter().map(|(key, value)| (format!("{key:?}"), json_of(value))).collect(),
    }
}

fn numbers(descriptor: &EnumDescriptor) -> Json {
    descriptor.values().map(|value| (value.number().to_string(), json!(value.name()))).collect()
}

fn signatures(methods: impl Iterator<Item = MethodDescriptor>) -> Json {
    let stream = |is_stream| if is_stream { "stream " } else { "" };
    let signature = |method: &MethodDescriptor| {
        let (input, output) = (stream(method.is_client_streaming()), stream(method.is_server_streaming()));
        format!("{input}{} -> {output}{}", method.input().full_name(), method.output().full_name())
    };
    methods.map(|method| (method.name().to_owned(), json!(signature(&method)))).collect()
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(super) fn unhex(text: &str) -> Vec<u8> {
    let byte = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).expect("a recording has hexadecimal digits");
    (0..text.len()).step_by(2).map(byte).collect()
}
