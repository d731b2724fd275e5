use super::*;
use crate::mirror::{Mirror, MirrorSettings};
use proptest::prelude::*;
use rmpv::Value;
use tandem_kv::{HashKey, Namespace, SequenceHash};

/// Payloads that vLLM 0.32.0 published, as hexadecimal digits.
const STORED: &str = include_str!("../../../testdata/vllm-0.32/stored.hex");
const HITS_THEN_STORED: &str = include_str!("../../../testdata/vllm-0.32/hits_then_stored.hex");
const CLEARED_THEN_STORED: &str = include_str!("../../../testdata/vllm-0.32/cleared_then_stored.hex");
const REMOVED_THEN_STORED: &str = include_str!("../../../testdata/vllm-0.32/removed_then_stored.hex");
/// A payload that SGLang 0.5.23 published, as hexadecimal digits.
const SGLANG_STORED: &str = include_str!("../../../testdata/sglang-0.5.23/stored.hex");

fn bytes(digits: &str) -> Vec<u8> {
    let digits: Vec<u8> = digits.chars().filter_map(|digit| digit.to_digit(16)).map(|digit| digit as u8).collect();
    digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

fn encode(value: &Value) -> Vec<u8> {
    let mut bytes = Vec::new();
    rmpv::encode::write_value(&mut bytes, value).unwrap();
    bytes
}

fn batch_of(events: Vec<Value>) -> Vec<u8> {
    encode(&Value::Array(vec![1.5.into(), Value::Array(events), 0.into()]))
}

fn named(name: &str, fields: &[(&str, Value)]) -> Value {
    let tag = [("type", Value::from(name))];
    Value::Map(tag.iter().chain(fields).map(|(key, value)| ((*key).into(), value.clone())).collect())
}

#[test]
fn recorded_stored_event_is_decoded() {
    let batch = decode(&bytes(STORED)).unwrap();
    assert_eq!(batch.data_parallel_rank, Some(0));
    let [EngineEvent::Stored(stored)] = &batch.events[..] else { panic!("{batch:?}") };
    assert_eq!(stored.hashes, [6_971_684_269_084_977_107, 17_369_516_024_744_833_275].map(EngineHash::Number));
    assert_eq!((&stored.parent, stored.block_size, stored.tokens.len()), (&None, 32, 64));
    assert_eq!(stored.tokens[..4], [1, 20, 7939, 15858]);
    assert_eq!(stored.extra_keys, [ExtraKeys::Text("a1b2c3d4e5f60719".to_owned()), ExtraKeys::None]);
    assert_eq!((&stored.tier, stored.group, stored.kind.as_deref()), (&Ok(Tier::Device), Some(0), Some("full_attention")));
    assert_eq!((&stored.lora, &stored.session), (&None, &None));
}

#[test]
fn events_recorded_from_vllm_are_decoded_with_their_session() {
    let batch = decode(&bytes(HITS_THEN_STORED)).unwrap();
    let [EngineEvent::Stored(hits), EngineEvent::Stored(stored)] = &batch.events[..] else { panic!("{batch:?}") };
    assert_eq!((hits.session.as_deref(), stored.session.as_deref()), (Some("req-78"), Some("req-78")));
    assert_eq!((hits.hashes.len(), stored.hashes.len()), (1, 2));
    assert_eq!((&hits.parent, stored.parent.as_ref()), (&None, hits.hashes.last()));
}

#[test]
fn recorded_clear_is_decoded_before_the_blocks_stored_after_it() {
    let batch = decode(&bytes(CLEARED_THEN_STORED)).unwrap();
    assert!(
        matches!(&batch.events[..], [EngineEvent::Cleared, EngineEvent::Stored(stored)] if stored.hashes.len() == 2),
        "{batch:?}"
    );
}

#[test]
fn recorded_removals_are_decoded_one_by_one_before_the_stored_blocks() {
    let batch = decode(&bytes(REMOVED_THEN_STORED)).unwrap();
    let (last, removed) = batch.events.split_last().unwrap();
    assert!(matches!(last, EngineEvent::Stored(_)), "{last:?}");
    assert_eq!(removed.len(), 25);
    for event in removed {
        let EngineEvent::Removed(removed) = event else { panic!("{event:?}") };
        assert_eq!((removed.hashes.len(), &removed.tier, removed.group), (1, &Ok(Tier::Device), Some(0)));
    }
}

#[test]
fn array_events_of_older_vllm_versions_are_decoded() {
    let hashes = || Value::Array(vec![Value::from(-1), Value::Binary(vec![1, 2])]);
    let tokens = Value::Array(vec![7.into(), 8.into()]);
    let stored = Value::Array(vec!["BlockStored".into(), hashes(), 5.into(), tokens, 1.into(), Value::Nil]);
    let removed = Value::Array(vec!["BlockRemoved".into(), hashes()]);
    let batch = decode(&batch_of(vec![stored, removed, Value::Array(vec!["AllBlocksCleared".into()])])).unwrap();
    let hashes = vec![EngineHash::Number(u64::MAX), EngineHash::Bytes([1, 2].into())];
    let expected = [
        EngineEvent::Stored(BlocksStored {
            hashes: hashes.clone(),
            parent: Some(EngineHash::Number(5)),
            tokens: vec![7, 8],
            block_size: 1,
            lora: None,
            extra_keys: Vec::new(),
            tier: Ok(Tier::Device),
            group: None,
            kind: None,
            window_tokens: None,
            session: None,
        }),
        EngineEvent::Removed(BlocksRemoved { hashes, tier: Ok(Tier::Device), group: None }),
        EngineEvent::Cleared,
    ];
    assert_eq!(batch.events, expected);
}

#[test]
fn event_recorded_from_sglang_is_decoded() {
    let batch = decode(&bytes(SGLANG_STORED)).unwrap();
    assert_eq!(batch.data_parallel_rank, Some(0));
    let [EngineEvent::Stored(stored)] = &batch.events[..] else { panic!("{batch:?}") };
    let first = (-6_692_850_346_602_941_858_i64).cast_unsigned();
    assert_eq!((stored.hashes.len(), &stored.hashes[0], &stored.parent), (4, &EngineHash::Number(first), &None));
    assert_eq!((stored.block_size, stored.tokens.len(), &stored.tokens[..2]), (16, 64, &[8_019, 8_056][..]));
    assert_eq!(stored.extra_keys, [ExtraKeys::Text("salt-one".to_owned())]);
    assert_eq!((&stored.tier, &stored.lora, stored.group), (&Ok(Tier::Device), &None, None));
}

/// The fields of SGLang 0.5.23. It leaves fields without a value out, except those that have no default value.
fn sglang_stored(parent: Value, tokens: Vec<Value>, more: &[(&str, Value)]) -> Value {
    let fields = [
        ("block_hashes", Value::Array(vec![Value::from(-2), 7.into()])),
        ("parent_block_hash", parent),
        ("token_ids", Value::Array(tokens)),
        ("block_size", 1.into()),
        ("lora_id", Value::Nil),
    ];
    named("BlockStored", &[&fields[..], more].concat())
}

#[test]
fn salt_in_sglangs_events_is_a_key_of_the_prompts_first_block_only() {
    let tokens = || vec![Value::from(3), 4.into()];
    let salted = [("medium", Value::from("GPU")), ("cache_salt", "s".into()), ("session_id", "x".into())];
    let batch = decode(&batch_of(vec![
        sglang_stored(Value::Nil, tokens(), &salted),
        sglang_stored(Value::from(-9), tokens(), &salted),
        sglang_stored(Value::Nil, tokens(), &[("medium", "CPU_PINNED".into())]),
        named("BlockRemoved", &[("block_hashes", Value::Array(vec![Value::from(-2)])), ("medium", "DISK".into())]),
        named("AllBlocksCleared", &[]),
    ]))
    .unwrap();
    let hashes = vec![EngineHash::Number(u64::MAX - 1), EngineHash::Number(7)];
    let first = BlocksStored {
        hashes: hashes.clone(),
        parent: None,
        tokens: vec![3, 4],
        block_size: 1,
        lora: None,
        extra_keys: vec![ExtraKeys::Text("s".to_owned())],
        tier: Ok(Tier::Device),
        group: None,
        kind: None,
        window_tokens: None,
        session: Some("x".to_owned()),
    };
    let second = BlocksStored { parent: Some(EngineHash::Number(9_u64.wrapping_neg())), extra_keys: Vec::new(), ..first.clone() };
    let unsalted = BlocksStored { extra_keys: Vec::new(), tier: Ok(Tier::Host), session: None, ..first.clone() };
    let removed = BlocksRemoved { hashes: hashes[..1].to_vec(), tier: Ok(Tier::Disk), group: None };
    let expected = [
        EngineEvent::Stored(first),
        EngineEvent::Stored(second),
        EngineEvent::Stored(unsalted),
        EngineEvent::Removed(removed),
        EngineEvent::Cleared,
    ];
    assert_eq!(batch.events, expected);
}

#[test]
fn first_token_of_each_pair_counts_in_events_of_sglang_with_a_draft_model() {
    let pair = |first: u32, second: u32| Value::Array(vec![first.into(), second.into()]);
    let tokens_of = |tokens| decode(&batch_of(vec![sglang_stored(Value::Nil, tokens, &[])])).map(|batch| batch.events);
    let events = tokens_of(vec![pair(3, 4), pair(4, 5)]).unwrap();
    assert!(matches!(&events[..], [EngineEvent::Stored(stored)] if stored.tokens == [3, 4]), "{events:?}");
    assert_eq!(tokens_of(vec![pair(3, 4), Value::Array(Vec::new())]), Err(MalformedBatch::Field("token_ids")));
}

#[test]
fn hash_above_64_bytes_is_malformed() {
    let removed = |length| {
        decode(&batch_of(vec![named("BlockRemoved", &[("block_hashes", Value::Array(vec![Value::Binary(vec![1; length])]))])]))
    };
    assert_eq!(removed(HASH_MAX).unwrap().events.len(), 1);
    assert_eq!(removed(HASH_MAX + 1), Err(MalformedBatch::Field("block_hashes")));
}

#[test]
fn unknown_events_fields_and_media_are_tolerated() {
    let hashes = || ("block_hashes", Value::Array(vec![1.into()]));
    let batch = decode(&batch_of(vec![
        named("BlockMoved", &[("to", "moon".into())]),
        named("BlockRemoved", &[hashes(), ("medium", "CPU".into()), ("reason", Value::Array(vec![1.into(), Value::Nil]))]),
        named("BlockRemoved", &[hashes(), ("medium", "TAPE".into())]),
        named("BlockRemoved", &[hashes(), ("medium", "CPU".into()), ("locality", "REMOTE".into())]),
        named("BlockRemoved", &[hashes(), ("medium", "CPU".into()), ("locality", "LOCAL".into())]),
    ]));
    let medium = |event: EngineEvent| match event {
        EngineEvent::Removed(removed) => removed.tier,
        other => panic!("{other:?}"),
    };
    let media: Vec<_> = batch.unwrap().events.into_iter().map(medium).collect();
    assert_eq!(media, [Ok(Tier::Host), Err(UnknownMedium("TAPE".to_owned())), Ok(Tier::Store), Ok(Tier::Host)]);
}

#[test]
fn media_are_tiers_in_any_case() {
    let tier = |medium: &str, locality: Option<&str>| {
        let locality = locality.map(|locality| ("locality", locality.into()));
        let fields: Vec<_> =
            [("block_hashes", Value::Array(vec![1.into()])), ("medium", medium.into())].into_iter().chain(locality).collect();
        match decode(&batch_of(vec![named("BlockRemoved", &fields)])).unwrap().events.remove(0) {
            EngineEvent::Removed(removed) => removed.tier,
            other => panic!("{other:?}"),
        }
    };
    let names = ["GPU", "CPU", "cpu", "CPU_PINNED", "Disk", "STORAGE", "external"];
    let tiers = [Tier::Device, Tier::Host, Tier::Host, Tier::Host, Tier::Disk, Tier::Disk, Tier::Store];
    assert_eq!(names.map(|name| tier(name, None)), tiers.map(Ok));
    assert_eq!([tier("STORAGE", Some("LOCAL")), tier("STORAGE", Some("REMOTE"))], [Ok(Tier::Disk), Ok(Tier::Store)]);
    assert_eq!(tier("STORAGE", Some("ORBIT")), Err(UnknownMedium("ORBIT".to_owned())));
    assert_eq!(tier(&"X".repeat(5_000), None), Err(UnknownMedium("X".repeat(MEDIUM_CHARS_MAX))));
}

/// Events as the public definitions of vLLM's OffloadingConnector describe them, with `self_describing_kv_events` and a file system as second tier.
#[test]
fn offload_events_keep_blocks_known_in_their_tier() {
    let (key, namespace) = (HashKey::NONE, Namespace::new("m", "", "", ""));
    let salt = Value::from(tandem_kv::cache_salt(&key, &namespace));
    let stored = |hash: u64, medium: &str, tokens: std::ops::Range<u64>, more: &[(&str, Value)]| {
        let parent = if hash > 1 { (hash - 1).into() } else { Value::Nil };
        let keys = if hash > 1 { Value::Nil } else { Value::Array(vec![salt.clone()]) };
        let fields = [
            ("block_hashes", Value::Array(vec![hash.into()])),
            ("parent_block_hash", parent),
            ("token_ids", Value::Array(tokens.map(Value::from).collect())),
            ("block_size", 4.into()),
            ("lora_id", Value::Nil),
            ("medium", medium.into()),
            ("lora_name", Value::Nil),
            ("extra_keys", Value::Array(vec![keys])),
            ("group_idx", 0.into()),
            ("kv_cache_spec_kind", "full_attention".into()),
        ];
        named("BlockStored", &[&fields, more].concat())
    };
    let removed = |hash: u64, medium: &str| {
        let fields = [("block_hashes", Value::Array(vec![hash.into()])), ("medium", medium.into()), ("group_idx", 0.into())];
        named("BlockRemoved", &fields)
    };
    let mut mirror = Mirror::new(MirrorSettings {
        hash_key: key,
        block_size: 4,
        engine_block_size: 4,
        device_blocks: 100,
        hits_are_reported: false,
        store: Some(Tier::Disk),
        engine_blocks_max: 100,
    })
    .unwrap();
    let prompt: Vec<u32> = (0..16).collect();
    let blocks = |from: u64, medium: &str| (from..5).map(|hash| stored(hash, medium, hash * 4 - 4..hash * 4, &[])).collect();
    let mut found = |events: Vec<Value>| {
        mirror.apply(&decode(&batch_of(events)).unwrap().events);
        mirror.cached_prefix(&namespace, &prompt, &[])
    };
    assert_eq!(found(blocks(1, "GPU")), [4, 0, 0, 0]);
    assert_eq!(found(blocks(1, "CPU")), [4, 0, 0, 0]);
    assert_eq!(found((2..5).rev().map(|hash| removed(hash, "GPU")).collect()), [1, 3, 0, 0]);
    // The host's memory is full, so the last blocks move to the shared file system.
    assert_eq!(found((3..5).map(|hash| stored(hash, "STORAGE", 0..0, &[("locality", "REMOTE".into())])).collect()), [1, 3, 0, 0]);
    assert_eq!(found((3..5).rev().map(|hash| removed(hash, "CPU")).collect()), [1, 1, 0, 2]);
    // A promotion loads them again.
    assert_eq!(found(blocks(3, "CPU")), [1, 3, 0, 0]);
    assert_eq!(found(vec![removed(2, "CPU"), removed(3, "STORAGE"), removed(4, "storage")]), [1, 0, 0, 0]);
    assert_eq!(found(vec![stored(2, "GPU", 4..8, &[])]), [2, 2, 0, 0]);
    assert_eq!(found(vec![named("AllBlocksCleared", &[])]), [0; 4]);
    assert_eq!((mirror.unroutable().medium, mirror.ignored_kinds().len()), (0, 0));
    mirror.apply(&decode(&batch_of(vec![stored(1, "TAPE", 0..4, &[])])).unwrap().events);
    assert_eq!(mirror.ignored_kinds().iter().collect::<Vec<_>>(), ["medium TAPE"]);
    assert!(mirror.snapshot().stored.iter().any(|chain| chain.sequence_hashes == [SequenceHash::UNFOLLOWED_LAYERS]));
}

#[test]
fn extra_keys_are_the_name_of_the_lora_then_images_then_the_cache_salt() {
    let keys = |keys: Vec<Value>| Value::Array(keys);
    let (id, lora, salt) = (ImageId([7; 32]), Value::from("lora"), Value::from("salt"));
    let pair = |id: &str, offset: Value| Value::Array(vec![id.into(), offset]);
    let image = pair(&id.to_string(), 3.into());
    let of_salt = || ExtraKeys::Text("salt".to_owned());
    let images = |salt: Option<&str>, at: &[usize]| ExtraKeys::Images {
        salt: salt.map(str::to_owned),
        images: at.iter().map(|at| ImageStart { at: *at, id }).collect(),
    };
    for (value, name, expected) in [
        (Value::Nil, None, ExtraKeys::None),
        (keys(vec![]), None, ExtraKeys::None),
        (keys(vec![salt.clone()]), None, of_salt()),
        (keys(vec![lora.clone(), salt.clone()]), None, ExtraKeys::Other),
        (keys(vec![image.clone()]), None, images(None, &[3])),
        (keys(vec![image.clone(), image.clone(), salt.clone()]), None, images(Some("salt"), &[3, 3])),
        (keys(vec![pair(&id.to_string(), (-5).into())]), None, images(None, &[])),
        (keys(vec![image.clone(), salt.clone(), salt.clone()]), None, ExtraKeys::Other),
        (keys(vec![salt.clone(), image.clone()]), None, ExtraKeys::Other),
        (keys(vec![image.clone(), 7.into()]), None, ExtraKeys::Other),
        (keys(vec![image.clone(), pair("an identity of another client", 3.into())]), None, ExtraKeys::Other),
        (keys(vec![pair(&id.to_string(), "3".into())]), None, ExtraKeys::Other),
        (keys(vec![Value::Array(vec![])]), None, ExtraKeys::Other),
        (keys(vec![lora.clone(), salt.clone()]), Some("lora"), of_salt()),
        (keys(vec![lora.clone()]), Some("lora"), ExtraKeys::None),
        (keys(vec![lora, image]), Some("lora"), images(None, &[3])),
        (keys(vec![salt]), Some("lora"), ExtraKeys::Other),
        (Value::Nil, Some("lora"), ExtraKeys::Other),
    ] {
        let bytes = encode(&value);
        let value = rmpv::decode::read_value_ref(&mut &bytes[..]).unwrap();
        assert_eq!(extra_keys(&value, name), Some(expected), "{value:?} {name:?}");
    }
}

#[test]
fn stored_event_names_the_lora_of_its_blocks() {
    let stored = |fields: &[(&str, Value)]| {
        let own = [
            ("block_hashes", Value::Array(vec![1.into()])),
            ("token_ids", Value::Array(vec![7.into()])),
            ("block_size", 1.into()),
        ];
        match decode(&batch_of(vec![named("BlockStored", &[&own, fields].concat())])).unwrap().events.pop() {
            Some(EngineEvent::Stored(stored)) => (stored.lora, stored.extra_keys),
            other => panic!("{other:?}"),
        }
    };
    let keys = Value::Array(vec![Value::Array(vec!["lora".into(), "salt".into()])]);
    let named = stored(&[("lora_id", 1.into()), ("lora_name", "lora".into()), ("extra_keys", keys.clone())]);
    assert_eq!(named, (Some("lora".to_owned()), vec![ExtraKeys::Text("salt".to_owned())]));
    assert_eq!(stored(&[("lora_id", 1.into()), ("extra_keys", keys)]), (None, vec![ExtraKeys::Other]));
}

#[test]
fn malformed_batches_are_refused() {
    let hashes = || ("block_hashes", Value::Array(vec![1.into()]));
    let stored = |fields: &[(&str, Value)]| batch_of(vec![named("BlockStored", fields)]);
    let tokens = || ("token_ids", Value::Array(vec![1.into()]));
    let size = || ("block_size", Value::from(1));
    assert!(decode(&stored(&[hashes(), tokens(), size()])).is_ok());
    for (payload, expected) in [
        (Vec::new(), MalformedBatch::NotMsgpack),
        (bytes(STORED)[..300].to_vec(), MalformedBatch::NotMsgpack),
        (vec![0x91; 1000], MalformedBatch::NotMsgpack),
        (vec![0; PAYLOAD_MAX + 1], MalformedBatch::TooLong(PAYLOAD_MAX + 1)),
        (encode(&1.into()), MalformedBatch::NotABatch),
        (encode(&Value::Array(vec![1.into(), 2.into()])), MalformedBatch::NotABatch),
        (batch_of(vec![1.into()]), MalformedBatch::NotABatch),
        (batch_of(vec![Value::Map(vec![])]), MalformedBatch::Field("type")),
        (stored(&[tokens(), size()]), MalformedBatch::Field("block_hashes")),
        (stored(&[hashes(), tokens()]), MalformedBatch::Field("block_size")),
        (stored(&[hashes(), size(), ("token_ids", Value::Array(vec![(-1).into()]))]), MalformedBatch::Field("token_ids")),
        (stored(&[hashes(), tokens(), size(), ("parent_block_hash", "x".into())]), MalformedBatch::Field("parent_block_hash")),
        (stored(&[hashes(), tokens(), size(), ("extra_keys", 1.into())]), MalformedBatch::Field("extra_keys")),
    ] {
        assert_eq!(decode(&payload), Err(expected));
    }
}

proptest! {
    #[test]
    fn decoding_any_payload_never_panics(payload in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = decode(&payload);
    }

    #[test]
    fn decoding_a_damaged_batch_never_panics(changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)) {
        for digits in [STORED, HITS_THEN_STORED, CLEARED_THEN_STORED] {
            let mut payload = bytes(digits);
            for (index, byte) in &changes {
                let index = index.index(payload.len());
                payload[index] = *byte;
            }
            let _ = decode(&payload);
        }
    }
}

#[test]
fn payload_with_too_many_values_is_refused_before_it_is_decoded() {
    let list = |count: usize| {
        let numbers = [&[0xdd][..], &(count as u32).to_be_bytes(), &vec![1; count]].concat();
        [&[0x92, 1][..], &numbers].concat()
    };
    assert_eq!(decode(&list(PAYLOAD_MAX - 100)), Err(MalformedBatch::TooMany));
    assert_eq!(decode(&list(VALUES_MAX)), Err(MalformedBatch::TooMany));
    assert_eq!(decode(&list(VALUES_MAX - 3)), Err(MalformedBatch::NotABatch), "numbers are no events");
}

#[test]
fn step_with_a_million_tokens_is_decoded() {
    let tokens = Value::Array(vec![200_000.into(); 1 << 20]);
    let hashes = Value::Array(vec![Value::Binary(vec![7; 32]); 1 << 16]);
    let keys = Value::Array(vec![Value::Array(vec!["salt".into()]); 1 << 16]);
    let fields = [("block_hashes", hashes), ("token_ids", tokens), ("block_size", 16.into()), ("extra_keys", keys)];
    let batch = decode(&batch_of(vec![named("BlockStored", &fields)])).unwrap();
    assert!(matches!(&batch.events[..], [EngineEvent::Stored(stored)] if stored.tokens.len() == 1 << 20));
}

proptest! {
    #[test]
    fn values_of_every_kind_are_counted(values in proptest::collection::vec(any_value(), 0..20)) {
        prop_assert_eq!(check_values(&encode(&Value::Array(values))), Ok(()));
    }
}

fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        any::<u64>().prop_map(Value::from),
        any::<u8>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<i8>().prop_map(Value::from),
        any::<f32>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<bool>().prop_map(Value::from),
        Just(Value::Nil),
        "[a-z]{0,400}".prop_map(Value::from),
        proptest::collection::vec(any::<u8>(), 0..70_000).prop_map(Value::from),
        (any::<i8>(), proptest::collection::vec(any::<u8>(), 0..40)).prop_map(|(kind, bytes)| Value::Ext(kind, bytes)),
    ];
    leaf.prop_recursive(3, 40, 20, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..20).prop_map(Value::Array),
            proptest::collection::vec((inner.clone(), inner), 0..20).prop_map(Value::Map),
        ]
    })
}
