//! What a process tells about itself in etcd: a key `/tandem/<cluster>/<role>/<instance_id>` and a card in JSON under it.

use serde::{Deserialize, Serialize};
use tandem_proto::{
    ClusterKey, Purpose, channel,
    v1::{WorkerInfo, worker_info},
};

/// What a process does in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Text in, text out.
    Frontend,
    /// Places requests.
    Router,
    /// Computes prompts.
    PrefillWorker,
    /// Generates.
    DecodeWorker,
}

impl Role {
    /// As in keys and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Frontend => "frontend",
            Self::Router => "router",
            Self::PrefillWorker => "prefill-worker",
            Self::DecodeWorker => "decode-worker",
        }
    }
}

/// The card of one instance. Readers ignore fields they do not know and need no other than the address: who dials asks the
/// process itself who it is, and that answer counts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Card {
    /// What it does.
    pub role: Role,
    /// `host:port` at which others reach it: gRPC, or HTTP of a frontend.
    pub address: String,
    /// New at every start.
    #[serde(default)]
    pub instance_id: String,
    /// Of Tandem.
    #[serde(default)]
    pub version: String,
    /// A worker's stable name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub worker_id: String,
    /// The served model's id, if it is known there.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub model: String,
    /// What its weights are.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub revision: String,
    /// Tokens in a block.
    #[serde(default)]
    pub block_size: u32,
    /// A worker's KV memory in blocks.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub capacity_blocks: u32,
    /// The longest sequence, in tokens.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub context_length: u32,
    /// The process's signature over cluster, role, instance and address, made with the cluster key. Empty: the cluster has no key.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub signature: Vec<u8>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// Why a value of etcd is skipped.
#[derive(Debug, thiserror::Error)]
pub(super) enum BadCard {
    #[error("it is not the JSON of a card")]
    Json(#[from] serde_json::Error),
    #[error("its address is not host:port")]
    Address(#[from] channel::InvalidAddress),
    #[error("it is not signed with this cluster's key; give all processes the same --cluster-key-file")]
    Unsigned,
}

impl Card {
    /// A worker's, as it describes itself; reached at `address`.
    pub fn of_worker(info: &WorkerInfo, address: String) -> Self {
        let role = match info.role() {
            worker_info::Role::Decode => Role::DecodeWorker,
            worker_info::Role::Prefill | worker_info::Role::Unspecified => Role::PrefillWorker,
        };
        let WorkerInfo { instance_id, version, worker_id, model, revision, .. } = info.clone();
        let WorkerInfo { block_size, capacity_blocks, context_length, .. } = *info;
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

    /// This card, as a process with the key registers it.
    pub(super) fn signed(mut self, cluster: &str, key: &ClusterKey) -> Self {
        self.signature = key.sign(Purpose::Registration, &[self.key(cluster).as_bytes(), self.address.as_bytes()]);
        self
    }

    pub(super) fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a card is plain values")
    }

    /// The card that was registered at `at`, which is signed if the cluster has a key.
    pub(super) fn from_json(value: &[u8], at: &str, key: &ClusterKey) -> Result<Self, BadCard> {
        let card: Self = serde_json::from_slice(value)?;
        channel::endpoint(&card.address)?;
        if !key.verifies(Purpose::Registration, &[at.as_bytes(), card.address.as_bytes()], &card.signature) {
            return Err(BadCard::Unsigned);
        }
        Ok(card)
    }
}

/// Of all keys of a cluster, and of no other's: its name has no slash.
pub(super) fn prefix(cluster: &str) -> String {
    format!("/tandem/{cluster}/")
}

/// Whether it is the key of a process with one of these roles.
pub(super) fn is_of(key: &str, cluster: &str, roles: &[Role]) -> bool {
    let role = key.strip_prefix(&prefix(cluster)).and_then(|rest| rest.split_once('/'));
    role.is_some_and(|(role, instance)| !instance.is_empty() && roles.iter().any(|wanted| wanted.name() == role))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card() -> Card {
        let info = WorkerInfo {
            role: worker_info::Role::Decode.into(),
            instance_id: "i7".to_owned(),
            worker_id: "d".to_owned(),
            block_size: 16,
            capacity_blocks: 9,
            ..Default::default()
        };
        Card::of_worker(&info, "h:1".to_owned())
    }

    #[test]
    fn a_card_comes_back_and_its_key_says_what_it_is() {
        let text = String::from_utf8(card().to_json()).expect("text");
        let expected = r#"{"role":"decode-worker","address":"h:1","instance_id":"i7","version":"","worker_id":"d","block_size":16,"capacity_blocks":9}"#;
        assert_eq!(text, expected);
        assert_eq!(Card::from_json(text.as_bytes(), "", &ClusterKey::default()).expect("ours"), card());
        let key = card().key("c");
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
    fn a_signature_holds_for_one_key_of_etcd_and_one_address() {
        let (key, stranger) = (ClusterKey::random(), ClusterKey::random());
        let signed = card().signed("c", &key);
        let read = |card: &Card, at: &str, key: &ClusterKey| Card::from_json(&card.to_json(), at, key).is_ok();
        let at = card().key("c");
        assert!(read(&signed, &at, &key) && read(&signed, &at, &ClusterKey::default()));
        assert!(!read(&card(), &at, &key) && !read(&signed, &at, &stranger));
        for elsewhere in ["/tandem/other/decode-worker/i7", "/tandem/c/router/i7", "/tandem/c/decode-worker/i8"] {
            assert!(!read(&signed, elsewhere, &key), "{elsewhere}");
        }
        assert!(!read(&Card { address: "attacker:1".to_owned(), ..signed }, &at, &key));
    }

    #[test]
    fn what_is_not_known_is_ignored_and_what_is_broken_is_refused() {
        let later = br#"{"role":"router","address":"h:1","shoe_size":[44]}"#;
        assert_eq!(Card::from_json(later, "", &ClusterKey::default()).expect("a later version's").address, "h:1");
        for bad in [
            &b""[..],
            b"h:1",
            br#"{"role":"router"}"#,
            br#"{"role":"router","address":"h"}"#,
            br#"{"role":"baker","address":"h:1"}"#,
            b"\xff",
        ] {
            assert!(Card::from_json(bad, "", &ClusterKey::default()).is_err(), "{}", String::from_utf8_lossy(bad));
        }
    }
}
