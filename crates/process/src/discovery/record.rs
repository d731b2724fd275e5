//! Member records. A process registers in etcd under the key `/tandem/<cluster>/<role>/<instance_id>`; the value is this record as JSON.

use serde::{Deserialize, Serialize};
use tandem_proto::{
    ClusterKey, Purpose, channel,
    v1::{WorkerInfo, worker_info},
};

/// The role of a process in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// The process serves the HTTP API.
    Frontend,
    /// The process chooses workers for requests.
    Router,
    /// The process computes the KV of prompts.
    PrefillWorker,
    /// The process generates tokens.
    DecodeWorker,
}

impl Role {
    /// Returns the role's name in keys and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Frontend => "frontend",
            Self::Router => "router",
            Self::PrefillWorker => "prefill-worker",
            Self::DecodeWorker => "decode-worker",
        }
    }
}

/// The record of one instance. A reader ignores unknown fields. It uses only the address: it connects there, requests the process's
/// description of itself, and relies on that description.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberRecord {
    /// The role of the process in the cluster.
    pub role: Role,
    /// `host:port` at which other processes reach this process: over HTTP if it is a frontend, otherwise over gRPC.
    pub address: String,
    /// The instance's id, which is new at every start.
    #[serde(default)]
    pub instance_id: String,
    /// The process's version of Tandem.
    #[serde(default)]
    pub version: String,
    /// The name that the operator gave the worker; empty for other processes.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub worker_id: String,
    /// The id of the served model; empty if the process does not know it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub model: String,
    /// The revision of the model's files.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub revision: String,
    /// The number of tokens in a block.
    #[serde(default)]
    pub block_size: u32,
    /// Size of a worker's KV memory, in blocks.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub capacity_blocks: u32,
    /// The length of the longest sequence, in tokens.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub context_length: u32,
    /// The process's signature over cluster, role, instance and address, made with the cluster key; empty if the cluster has no key.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub signature: Vec<u8>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

#[derive(Debug, thiserror::Error)]
pub(super) enum InvalidRecord {
    #[error("invalid member record: {0}")]
    Json(#[from] serde_json::Error),
    #[error("invalid member record: the address is not host:port")]
    Address(#[from] channel::InvalidAddress),
    #[error("the member record is not signed with this cluster's key; give all processes the same --cluster-key-file")]
    Unsigned,
}

impl MemberRecord {
    /// Returns the record of a worker that describes itself with `info` and is reached at `address`.
    pub fn of_worker(info: &WorkerInfo, address: String) -> Self {
        let role = match info.role() {
            worker_info::Role::Decode => Role::DecodeWorker,
            worker_info::Role::Prefill | worker_info::Role::Unspecified => Role::PrefillWorker,
        };
        let WorkerInfo { instance_id, version, worker_id, model, revision, block_size, capacity_blocks, context_length, .. } =
            info.clone();
        Self {
            role,
            address,
            instance_id,
            version,
            worker_id,
            model,
            revision,
            block_size,
            capacity_blocks,
            context_length,
            signature: Vec::new(),
        }
    }

    pub(super) fn key(&self, cluster: &str) -> String {
        format!("{}{}/{}", prefix(cluster), self.role.name(), self.instance_id)
    }

    /// Returns this record with its signature, which is made with the cluster key.
    pub(super) fn signed(mut self, cluster: &str, key: &ClusterKey) -> Self {
        self.signature = key.sign(Purpose::Registration, &[self.key(cluster).as_bytes(), self.address.as_bytes()]);
        self
    }

    pub(super) fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a record can be serialized")
    }

    /// Parses a record that was registered under the etcd key `at`. If the cluster has a key, the record must be signed with it.
    pub(super) fn from_json(value: &[u8], at: &str, key: &ClusterKey) -> Result<Self, InvalidRecord> {
        let record: Self = serde_json::from_slice(value)?;
        channel::endpoint(&record.address)?;
        if !key.verifies(Purpose::Registration, &[at.as_bytes(), record.address.as_bytes()], &record.signature) {
            return Err(InvalidRecord::Unsigned);
        }
        Ok(record)
    }
}

pub(super) fn prefix(cluster: &str) -> String {
    format!("/tandem/{cluster}/")
}

/// Returns whether `key` is the etcd key of a process that belongs to the cluster and has one of these roles.
pub(super) fn is_of(key: &str, cluster: &str, roles: &[Role]) -> bool {
    let role = key.strip_prefix(&prefix(cluster)).and_then(|rest| rest.split_once('/'));
    role.is_some_and(|(role, instance)| !instance.is_empty() && roles.iter().any(|wanted| wanted.name() == role))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> MemberRecord {
        let info = WorkerInfo {
            role: worker_info::Role::Decode.into(),
            instance_id: "i7".to_owned(),
            worker_id: "d".to_owned(),
            block_size: 16,
            capacity_blocks: 9,
            ..Default::default()
        };
        MemberRecord::of_worker(&info, "h:1".to_owned())
    }

    #[test]
    fn member_record_round_trips_and_its_key_names_cluster_and_role() {
        let text = String::from_utf8(record().to_json()).expect("the record is UTF-8");
        let expected = r#"{"role":"decode-worker","address":"h:1","instance_id":"i7","version":"","worker_id":"d","block_size":16,"capacity_blocks":9}"#;
        assert_eq!(text, expected);
        assert_eq!(MemberRecord::from_json(text.as_bytes(), "", &ClusterKey::default()).expect("the record is valid"), record());
        let key = record().key("c");
        assert_eq!(key, "/tandem/c/decode-worker/i7");
        for (key, cluster, roles, is) in [
            (&*key, "c", &[Role::DecodeWorker][..], true),
            (&key, "c", &[Role::PrefillWorker, Role::DecodeWorker], true),
            (&key, "c", &[Role::Router], false),
            (&key, "c", &[], false),
            (&key, "other", &[Role::DecodeWorker], false),
            ("/tandem/cc/decode-worker/i", "c", &[Role::DecodeWorker], false),
            ("/tandem/c/decode-worker/", "c", &[Role::DecodeWorker], false),
            ("/tandem/c/decode-worker", "c", &[Role::DecodeWorker], false),
            ("/tandem/c/frontend/i", "c", &[Role::Frontend], true),
        ] {
            assert_eq!(is_of(key, cluster, roles), is, "{key} {cluster} {roles:?}");
        }
    }

    #[test]
    fn signature_is_valid_for_one_etcd_key_and_one_address() {
        let (key, stranger) = (ClusterKey::random(), ClusterKey::random());
        let signed = record().signed("c", &key);
        let read =
            |record: &MemberRecord, at: &str, key: &ClusterKey| MemberRecord::from_json(&record.to_json(), at, key).is_ok();
        let at = record().key("c");
        assert!(read(&signed, &at, &key) && read(&signed, &at, &ClusterKey::default()));
        assert!(!read(&record(), &at, &key) && !read(&signed, &at, &stranger));
        for elsewhere in ["/tandem/other/decode-worker/i7", "/tandem/c/router/i7", "/tandem/c/decode-worker/i8"] {
            assert!(!read(&signed, elsewhere, &key), "{elsewhere}");
        }
        assert!(!read(&MemberRecord { address: "attacker:1".to_owned(), ..signed }, &at, &key));
    }

    /// Computed with Python's `hmac`: HMAC-SHA256 over each part after its length (8 bytes, little endian), with the key of
    /// "tandem/1/registration". Processes of earlier versions sign and check the same bytes.
    #[test]
    fn signature_equals_the_reference_value() {
        let key = ClusterKey::new(b"0123456789abcdef0123456789abcdef").expect("the secret is long enough");
        let expected = [
            94, 245, 198, 170, 1, 167, 75, 72, 235, 4, 72, 175, 128, 242, 240, 193, 155, 61, 183, 122, 70, 253, 165, 201, 194,
            103, 59, 207, 12, 159, 41, 252,
        ];
        assert_eq!(record().signed("c", &key).signature, expected);
    }

    #[test]
    fn unknown_fields_are_ignored_and_invalid_records_refused() {
        let later = br#"{"role":"router","address":"h:1","shoe_size":[44]}"#;
        assert_eq!(
            MemberRecord::from_json(later, "", &ClusterKey::default()).expect("the record of a later version is valid").address,
            "h:1"
        );
        for bad in [
            &b""[..],
            b"h:1",
            br#"{"role":"router"}"#,
            br#"{"role":"router","address":"h"}"#,
            br#"{"role":"baker","address":"h:1"}"#,
            b"\xff",
        ] {
            assert!(MemberRecord::from_json(bad, "", &ClusterKey::default()).is_err(), "{}", String::from_utf8_lossy(bad));
        }
    }
}
