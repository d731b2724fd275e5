//! Compares the identities of processes, and names the first difference.

use crate::v1::{Identity, WorkerInfo};

/// A difference between the identities of a process and of its cluster.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the process's {field} is {found}, but the cluster's is {expected}; {}", self.remedy())]
pub struct Difference {
    /// The name of the differing field, such as `block size`.
    pub field: &'static str,
    /// The field's value in the identity of the process.
    pub found: String,
    /// The field's value in the identity of the cluster.
    pub expected: String,
}

const CLUSTER_KEY: &str = "cluster key";
const BLOCK_SIZE: &str = "block size";

impl Difference {
    fn remedy(&self) -> &'static str {
        match self.field {
            CLUSTER_KEY => "give all processes the same --cluster-key-file",
            BLOCK_SIZE => "start the process with the cluster's --block-size",
            _ => "start the process with the cluster's value",
        }
    }
}

impl Identity {
    /// Checks whether a process with this identity belongs to a cluster with the identity `cluster`. A field that is empty in either identity is not
    /// compared, except the cluster key: a process with a key differs from a process without a key.
    ///
    /// # Errors
    /// Returns the first difference, if there is one.
    pub fn fits(&self, cluster: &Self) -> Result<(), Difference> {
        let size = |size: u32| if size == 0 { String::new() } else { size.to_string() };
        let (found_size, expected_size) = (size(self.block_size), size(cluster.block_size));
        for (field, found, expected) in [
            ("cluster", &*self.cluster, &*cluster.cluster),
            ("model", &self.model, &cluster.model),
            ("revision", &self.revision, &cluster.revision),
            (BLOCK_SIZE, &found_size, &expected_size),
        ] {
            if !found.is_empty() && !expected.is_empty() && found != expected {
                return Err(Difference { field, found: shown(found), expected: shown(expected) });
            }
        }
        if self.key_fingerprint != cluster.key_fingerprint {
            let named = |fingerprint: &str| match fingerprint {
                "" => "absent".to_owned(),
                fingerprint => format!("the one with fingerprint {fingerprint}"),
            };
            let (found, expected) = (named(&self.key_fingerprint), named(&cluster.key_fingerprint));
            return Err(Difference { field: CLUSTER_KEY, found, expected });
        }
        let (found, expected) = (&self.version, &cluster.version);
        if found.is_empty() || expected.is_empty() || generation(found) == generation(expected) {
            return Ok(());
        }
        Err(Difference { field: "version", found: found.clone(), expected: expected.clone() })
    }

    /// Returns this identity with its empty fields filled from `other`. The key fingerprint is not filled, because a process always knows
    /// whether it has a key.
    pub fn or(self, other: &Self) -> Self {
        let text = |ours: String, theirs: &String| if ours.is_empty() { theirs.clone() } else { ours };
        Self {
            cluster: text(self.cluster, &other.cluster),
            version: text(self.version, &other.version),
            model: text(self.model, &other.model),
            revision: text(self.revision, &other.revision),
            block_size: if self.block_size == 0 { other.block_size } else { self.block_size },
            key_fingerprint: self.key_fingerprint,
        }
    }
}

impl WorkerInfo {
    /// The `transfer_family` of workers that never exchange KV.
    pub const NO_TRANSFER_FAMILY: &'static str = "none";

    /// Returns the worker's transfer family; `None` if it never exchanges KV.
    pub fn family(&self) -> Option<&str> {
        (self.transfer_family != Self::NO_TRANSFER_FAMILY).then_some(&*self.transfer_family)
    }
}

impl From<&WorkerInfo> for Identity {
    fn from(info: &WorkerInfo) -> Self {
        Self {
            cluster: info.cluster.clone(),
            version: info.version.clone(),
            model: info.model.clone(),
            revision: info.revision.clone(),
            block_size: info.block_size,
            key_fingerprint: info.key_fingerprint.clone(),
        }
    }
}

/// Shortens a revision for a message, which shows only the first digits. The whole revision is compared.
fn shown(text: &str) -> String {
    const HASH_DIGITS: usize = 64;
    const SHOWN_DIGITS: usize = 16;
    match text.get(..HASH_DIGITS) {
        Some(hash) if hash.bytes().all(|digit| digit.is_ascii_hexdigit()) => {
            format!("{}{}", &hash[..SHOWN_DIGITS], &text[HASH_DIGITS..])
        }
        _ => text.to_owned(),
    }
}

/// Returns the version up to its first number that is not 0: `0.3` for `0.3.7`, `2` for `2.5.1`. Processes are compatible if this part of their
/// versions is equal: an older process may ignore what a newer one has added.
fn generation(version: &str) -> &str {
    let mut end = 0;
    for number in version.split('.') {
        end += number.len() + 1;
        if number != "0" {
            break;
        }
    }
    &version[..version.len().min(end - 1)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> Identity {
        Identity {
            cluster: "c".into(),
            version: "0.3.7".into(),
            model: "m".into(),
            revision: "r".into(),
            block_size: 16,
            key_fingerprint: String::new(),
        }
    }

    #[test]
    fn mismatch_of_identities_names_the_differing_field() {
        for (other, field) in [
            (Identity { cluster: "d".into(), ..identity() }, "cluster"),
            (Identity { model: "n".into(), ..identity() }, "model"),
            (Identity { revision: "s".into(), ..identity() }, "revision"),
            (Identity { block_size: 32, ..identity() }, "block size"),
            (Identity { version: "0.4.0".into(), ..identity() }, "version"),
        ] {
            let difference = other.fits(&identity()).expect_err(field);
            assert_eq!(difference.field, field);
            assert!(difference.to_string().contains(&difference.expected), "{difference}");
        }
    }

    #[test]
    fn revisions_are_compared_completely_and_shown_shortened() {
        let revision = |text: String| Identity { revision: text, ..identity() };
        let hash = "0123456789abcdef".repeat(4);
        let other = format!("{}0", &hash[..63]);
        let difference = revision(format!("{other}-cuda")).fits(&revision(hash.clone())).expect_err("the last digit differs");
        assert_eq!((&*difference.found, &*difference.expected), ("0123456789abcdef-cuda", "0123456789abcdef"));
        assert_eq!(revision(hash.clone()).fits(&revision(hash)), Ok(()));
    }

    #[test]
    fn empty_fields_of_an_identity_are_not_compared_and_can_be_filled() {
        let nothing = Identity::default();
        assert_eq!(
            (nothing.fits(&identity()), identity().fits(&nothing), identity().fits(&identity())),
            (Ok(()), Ok(()), Ok(()))
        );
        assert_eq!(nothing.clone().or(&identity()), identity());
        assert_eq!(identity().or(&nothing), identity());
        assert_eq!(Identity { block_size: 32, ..nothing }.or(&identity()).block_size, 32);
    }

    #[test]
    fn key_mismatch_is_refused_with_a_remedy() {
        let keyed = |fingerprint: &str| Identity { key_fingerprint: fingerprint.to_owned(), ..identity() };
        assert_eq!(keyed("aa").fits(&keyed("aa")), Ok(()));
        for (found, expected, text) in
            [("", "aa", "is absent"), ("aa", "", "the cluster's is absent"), ("bb", "aa", "fingerprint bb")]
        {
            let difference = keyed(found).fits(&keyed(expected)).expect_err("the keys differ").to_string();
            assert!(difference.contains(text) && difference.contains("--cluster-key-file"), "{difference}");
        }
        assert_eq!(Identity::default().or(&keyed("aa")).key_fingerprint, "", "the key's fingerprint is not copied");
    }

    #[test]
    fn versions_with_the_same_first_nonzero_number_are_compatible() {
        for (one, other, fit) in [
            ("0.3.7", "0.3.0", true),
            ("0.3.7", "0.4.7", false),
            ("0.0.3", "0.0.4", false),
            ("1.2.0", "1.9.3", true),
            ("1.2.0", "2.2.0", false),
            ("0.3", "0.3.1", true),
            ("0", "0", true),
            ("x", "y", false),
        ] {
            let version = |version: &str| Identity { version: version.to_owned(), ..Identity::default() };
            assert_eq!(version(one).fits(&version(other)).is_ok(), fit, "{one} {other}");
        }
    }
}
