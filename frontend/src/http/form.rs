//! Finds the field `model` of a form (`multipart/form-data`, RFC 7578) in a body that is passed on unchanged.
//!
//! The server that answers must find the same model, or a key could use a model that it may not use. So only the form in which clients
//! write is accepted: anything that two readers could understand differently is refused.

use memchr::memmem;
use tandem_api::{Problem, RequestError};

/// The maximum number of fields. A transcription has about 25.
const FIELDS_MAX: usize = 128;
/// The maximum length of the headers of one field, in bytes.
const HEAD_BYTES_MAX: usize = 8 << 10;
/// The maximum length of a boundary, as RFC 2046 defines it.
const BOUNDARY_BYTES_MAX: usize = 70;

/// Returns the value of the field `model`; `None` if there is none. `kind` is the value of the header `Content-Type`.
///
/// # Errors
/// The form is malformed or unusual, or has two models.
pub(super) fn model(kind: &str, body: &[u8]) -> Result<Option<String>, RequestError> {
    let malformed = |rule| RequestError::invalid("body", Problem::Rule { rule });
    let boundary = boundary(kind).ok_or_else(|| malformed("needs one boundary of at most 70 characters in its Content-Type"))?;
    let delimiter = format!("\r\n--{boundary}");
    // The first delimiter has no line before it.
    let mut rest = body.strip_prefix(&delimiter.as_bytes()[2..]);
    let mut model = None;
    for _ in 0..=FIELDS_MAX {
        let after = rest.ok_or_else(|| malformed("must be a form whose fields are separated by its boundary"))?;
        if after.starts_with(b"--") {
            return Ok(model);
        }
        let (name, value, next) = field(after, &delimiter).ok_or_else(|| {
            malformed("has a field whose headers are not understood; write 'Content-Disposition: form-data; name=\"…\"'")
        })?;
        if name == "model" {
            let value = String::from_utf8(value.to_vec()).map_err(|_| malformed("has a field 'model' that is not UTF-8"))?;
            if model.replace(value).is_some() {
                return Err(malformed("has more than one field 'model'"));
            }
        }
        rest = Some(next);
    }
    Err(RequestError::invalid("body", Problem::TooMany { max: FIELDS_MAX, unit: "fields" }))
}

/// Returns the boundary that a content type names, with or without quotes.
fn boundary(kind: &str) -> Option<&str> {
    let mut named = kind.split(';').skip(1).filter_map(|parameter| {
        let (name, value) = parameter.trim().split_once('=')?;
        name.eq_ignore_ascii_case("boundary").then_some(value)
    });
    let boundary = named.next().filter(|_| named.next().is_none())?;
    let boundary = boundary.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(boundary);
    let is_usual = boundary.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"'()+_,-./:=?".contains(&byte));
    (is_usual && (1..=BOUNDARY_BYTES_MAX).contains(&boundary.len())).then_some(boundary)
}

/// Returns the name and the value of the field that follows a delimiter, and what follows the next delimiter.
fn field<'a>(after: &'a [u8], delimiter: &str) -> Option<(&'a str, &'a [u8], &'a [u8])> {
    let after = after.strip_prefix(b"\r\n")?;
    let head_end = memmem::find(&after[..after.len().min(HEAD_BYTES_MAX)], b"\r\n\r\n")?;
    // The delimiter may begin with the line end of an empty value.
    let content = &after[head_end + 4..];
    let end = memmem::find(content, delimiter.as_bytes())?;
    Some((name(std::str::from_utf8(&after[..head_end]).ok()?)?, &content[..end], &content[end + delimiter.len()..]))
}

/// Returns the name of the field with these headers.
fn name(head: &str) -> Option<&str> {
    let mut dispositions = Vec::new();
    for line in head.split("\r\n") {
        let (key, value) = line.split_once(':')?;
        // A name with a space would be the continuation of the line before, or be read differently elsewhere.
        if key.is_empty() || line.contains(['\r', '\n', '\0']) || key.contains(char::is_whitespace) {
            return None;
        }
        dispositions.extend(key.eq_ignore_ascii_case("content-disposition").then_some(value.trim()));
    }
    let [disposition] = dispositions[..] else { return None };
    let (kind, rest) = disposition.split_once(';')?;
    let (name, rest) = rest.trim_start().strip_prefix("name=\"")?.split_once('"')?;
    let others = rest.to_ascii_lowercase().replace("filename=", "").replace("filename*=", "");
    let is_plain = kind.eq_ignore_ascii_case("form-data") && !name.contains('\\') && (rest.is_empty() || rest.starts_with(';'));
    (is_plain && !others.contains("name=") && !others.contains("name*")).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: &str = "multipart/form-data; boundary=xYz";

    fn part(head: &str, value: &str) -> String {
        format!("--xYz\r\n{head}\r\n\r\n{value}\r\n")
    }

    fn field_of(name: &str, value: &str) -> String {
        part(&format!("Content-Disposition: form-data; name=\"{name}\""), value)
    }

    fn read(parts: &[String]) -> Result<Option<String>, String> {
        model(KIND, format!("{}--xYz--\r\n", parts.concat()).as_bytes()).map_err(|error| error.to_string())
    }

    #[test]
    fn model_is_found_wherever_it_is_and_however_clients_write_it() {
        let audio = part(
            "content-disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav",
            "\r\n--xY\r\n--xy\0\n\r\n",
        );
        let named = Ok(Some("whisper".to_owned()));
        assert_eq!(read(&[field_of("model", "whisper"), audio.clone()]), named);
        assert_eq!(read(&[audio.clone(), field_of("model", "whisper"), field_of("prompt", "model=x")]), named);
        assert_eq!(read(&[part("Content-Disposition:form-data;name=\"model\"", "whisper")]), named);
        assert_eq!(read(&[field_of("", ""), field_of("model", "")]), Ok(Some(String::new())));
        assert_eq!(read(&[audio]), Ok(None));
        assert_eq!(read(&[]), Ok(None));
        for kind in ["multipart/form-data; charset=utf-8; Boundary=\"xYz\"", KIND] {
            let form = format!("{}--xYz--", field_of("model", "m"));
            assert_eq!(model(kind, form.as_bytes()).expect("the form is plain"), Some("m".to_owned()), "{kind}");
        }
    }

    #[test]
    fn form_that_two_readers_could_understand_differently_is_refused() {
        for head in [
            "Content-Disposition: form-data; name=model",
            "Content-Disposition: form-data; filename=\"; name=\"; name=\"model\"",
            "Content-Disposition: form-data; name=\"file\"; name=\"model\"",
            "Content-Disposition: form-data; name=\"file\"; NAME*=utf-8''model",
            "Content-Disposition: form-data; name=\"mo\\\"del\"",
            "Content-Disposition: form-data; name=\"file\"x; name=\"model\"",
            "Content-Disposition: attachment; name=\"file\"",
            "Content-Disposition: form-data; name=\"a\"\r\nContent-Disposition: form-data; name=\"model\"",
            "Content-Disposition: form-data;\r\n name=\"model\"",
            "Content-Disposition : form-data; name=\"model\"",
            "Content-Disposition: form-data; name=\"file\"\nx: y",
            "Content-Type: text/plain",
            "",
        ] {
            assert!(read(&[part(head, "a")]).is_err_and(|error| error.contains("headers are not understood")), "{head:?}");
        }
        let twice = read(&[field_of("model", "a"), field_of("model", "b")]);
        assert!(twice.is_err_and(|error| error.contains("more than one field 'model'")));
        assert!(read(&vec![field_of("a", ""); FIELDS_MAX]).is_ok());
        assert!(read(&vec![field_of("a", ""); FIELDS_MAX + 1]).is_err_and(|error| error.contains("at most 128 fields")));
        let long = format!("Content-Disposition: form-data; name=\"{}\"", "x".repeat(HEAD_BYTES_MAX));
        assert!(read(&[part(&long, "a")]).is_err());
        for body in [
            &b""[..],
            b"--xYz",
            b"--xYz\r\n",
            b"\r\n--xYz--",
            b"--xYzz--",
            b"--xYz\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\nb",
        ] {
            assert!(model(KIND, body).is_err(), "{body:?}");
        }
        let long = format!("multipart/form-data; boundary={}", "x".repeat(71));
        for kind in [
            "multipart/form-data",
            "multipart/form-data; boundary=",
            "multipart/form-data; boundary=a; boundary=b",
            long.as_str(),
        ] {
            assert!(model(kind, b"--a--").is_err(), "{kind}");
        }
        assert!(
            model(KIND, &[part("Content-Disposition: form-data; name=\"model\"", "").as_bytes(), b"\xff\r\n--xYz--"].concat())
                .is_err()
        );
    }
}
