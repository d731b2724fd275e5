//! The images of a conversation: their parts in requests, the limits that are checked before a renderer decodes them, and the body of the
//! renderer's request.
//!
//! In a conversation's texts, `MARK` stands for an image, and `BREAK` is between two parts of a message with images.

mod header;

use crate::{
    error::{Problem, RequestError, at_most},
    fields::{Reader, readable},
    unsupported::{Setting, check},
};
use base64::{Engine as _, prelude::BASE64_STANDARD as BASE64};
use serde::{
    Deserialize,
    de::{self, MapAccess, Visitor, value::MapAccessDeserializer},
};
use tandem_proto::IMAGES_MAX;
use tandem_text::ServedModel;

/// The types of parts that are images in OpenAI's APIs.
pub(crate) const KINDS: [&str; 2] = ["image_url", "input_image"];
/// Stands for an image. No text uses this code point.
pub(crate) const MARK: char = '\u{FFFF}';
pub(crate) const BREAK: char = '\u{FFFE}';
pub(crate) const OTHER_MARK: &str = "must not have the code points U+FFFE and U+FFFF, which no text uses, together with images";

/// The maximum size of an image's file, in bytes.
const BYTES_MAX: usize = 16 << 20;
/// The maximum number of pixels of all images of a request. Decoded, they take 192 MiB.
const ALL_PIXELS_MAX: u64 = 64 << 20;
const MEDIA_TYPES: [&str; 4] = ["image/png", "image/jpeg", "image/webp", "image/gif"];
/// The number of a prompt's last tokens in which the beginning of the model's reasoning is found.
pub(crate) const END_TOKENS: usize = 64;

/// The images of a conversation as the client sent them, in order.
#[derive(Default)]
pub struct ImageParts {
    pub(crate) list: Vec<ImagePart>,
    /// Whether the model reads images.
    are_read: bool,
}

pub(crate) struct ImagePart {
    /// The part's field, for errors.
    at: String,
    pub(crate) media_type: &'static str,
    pub(crate) base64: String,
}

/// An image whose header was checked.
#[derive(Debug)]
pub struct CheckedImage {
    /// The media type, which the first bytes of the file confirm.
    pub media_type: &'static str,
    /// The bytes of the file.
    pub data: Vec<u8>,
}

/// The field `image_url` of a part: a URL, or an object with it.
pub(crate) struct ImageUrl {
    url: Option<String>,
    uuid: Setting,
}

#[derive(Deserialize)]
struct ImageUrlFields {
    url: Option<String>,
    #[serde(default)]
    uuid: Setting,
}

/// The field `source` of Anthropic's blocks.
#[derive(Default, Deserialize)]
pub(crate) struct ImageSource {
    #[serde(rename = "type")]
    kind: Option<String>,
    media_type: Option<String>,
    data: Option<String>,
}

readable! {
    [] ImageUrl, deserialize_any, "a string or an object with 'url'",

    fn visit_str<E: de::Error>(self, url: &str) -> Result<ImageUrl, E> {
        Ok(ImageUrl { url: Some(url.to_owned()), uuid: Setting::Nothing })
    }

    fn visit_map<A: MapAccess<'de>>(self, object: A) -> Result<ImageUrl, A::Error> {
        let ImageUrlFields { url, uuid } = ImageUrlFields::deserialize(MapAccessDeserializer::new(object))?;
        Ok(ImageUrl { url, uuid })
    }
}

pub(crate) fn rule(at: impl Into<String>, rule: &'static str) -> RequestError {
    RequestError::invalid(at, Problem::Rule { rule })
}

impl ImageParts {
    pub(crate) fn of(model: &ServedModel) -> Self {
        Self { list: Vec::new(), are_read: model.reads_images() }
    }

    pub(crate) fn are_read(&self) -> bool {
        self.are_read
    }

    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    /// Returns whether the conversation has no image.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Adds the image of a part of OpenAI's APIs. Returns the text that stands for it.
    pub(crate) fn add_url(&mut self, at: &str, url: Option<ImageUrl>) -> Result<String, RequestError> {
        let at = format!("{at}.image_url");
        let url = url.ok_or_else(|| RequestError::invalid(&*at, Problem::Missing))?;
        check(&format!("{at}.uuid"), &url.uuid, &[])?;
        let url = url.url.ok_or_else(|| RequestError::invalid(format!("{at}.url"), Problem::Missing))?;
        let inline = url.strip_prefix("data:").and_then(|rest| rest.split_once(";base64,"));
        let not_inline = "must be a URL 'data:image/…;base64,…' with the image itself: this server fetches no images";
        let (media_type, base64) = inline.ok_or_else(|| rule(&*at, not_inline))?;
        self.add(at, media_type, base64.to_owned())
    }

    /// Adds the image of a block of Anthropic's API. Returns the text that stands for it.
    pub(crate) fn add_source(&mut self, at: &str, source: Option<ImageSource>) -> Result<String, RequestError> {
        let at = format!("{at}.source");
        let missing = |field: &str| RequestError::invalid(format!("{at}{field}"), Problem::Missing);
        let ImageSource { kind, media_type, data } = source.ok_or_else(|| missing(""))?;
        match kind.as_deref() {
            None => return Err(missing(".type")),
            Some("base64") => {}
            Some(_) => {
                return Err(rule(format!("{at}.type"), "must be 'base64': this server fetches no images and stores no files"));
            }
        }
        let (media_type, data) = (media_type.ok_or_else(|| missing(".media_type"))?, data.ok_or_else(|| missing(".data"))?);
        self.add(at, &media_type, data)
    }

    fn add(&mut self, at: String, media_type: &str, base64: String) -> Result<String, RequestError> {
        at_most(&at, self.list.len() + 1, IMAGES_MAX, "images in the request")?;
        let known = MEDIA_TYPES.into_iter().find(|known| media_type.eq_ignore_ascii_case(known));
        let media_type = known.ok_or_else(|| rule(&*at, "must be of type image/png, image/jpeg, image/webp or image/gif"))?;
        at_most(&at, base64.len() / 4 * 3, BYTES_MAX, "bytes")?;
        self.list.push(ImagePart { at, media_type, base64 });
        Ok(MARK.to_string())
    }

    /// Decodes the base64 of the images and checks their headers, in tens of milliseconds for the longest body. Decodes no pixels.
    ///
    /// # Errors
    /// The base64 is malformed; or the header is malformed, of another type than the part says, or of too many pixels; or all images together are.
    pub fn decode(&self) -> Result<Vec<CheckedImage>, RequestError> {
        let mut all_pixels = 0;
        let decode = |ImagePart { at, media_type, base64 }: &ImagePart| {
            let data =
                BASE64.decode(base64).map_err(|_| rule(at, "has malformed base64; use the standard alphabet with padding"))?;
            all_pixels += header::check(&data, media_type).map_err(|text| rule(at, text))?;
            if all_pixels > ALL_PIXELS_MAX {
                return Err(rule(at, "brings the images of the request above 67,108,864 pixels; send fewer or smaller images"));
            }
            Ok(CheckedImage { media_type, data })
        };
        self.list.iter().map(decode).collect()
    }
}

/// Joins the texts of the parts of a message with this many images: like vLLM by line feeds, or so that the renderer gets the same parts.
pub(crate) fn joined(texts: &[String], images: usize) -> String {
    if images == 0 { texts.join("\n") } else { texts.join(&BREAK.to_string()) }
}

#[cfg(test)]
mod tests;
