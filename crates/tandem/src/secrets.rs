//! Reads secrets from files. Flags are not safe for secrets, because they are visible in the list of processes. Environment variables are
//! visible in `docker inspect` and to child processes.

use serde::Serializer;
use tandem_process::Secret;

/// Serializes the path of a secret's file.
pub(crate) fn path<S: Serializer>(secret: &Option<Secret>, serializer: S) -> Result<S::Ok, S::Error> {
    match secret.as_ref().and_then(Secret::file) {
        Some(path) => serializer.serialize_str(&path.to_string_lossy()),
        None => serializer.serialize_none(),
    }
}
