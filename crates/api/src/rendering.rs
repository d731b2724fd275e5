//! The body of the request with which a renderer converts a conversation with images to tokens, and its answer.

use crate::{
    chat::{Chat, Encoded},
    error::RequestError,
    images::{BREAK, END_TOKENS, ImagePart, MARK, OTHER_MARK, rule},
};
use serde_json::{Value, json};
use std::borrow::Cow;
use tandem_kv::TokenId;
use tandem_text::{
    ServedModel, Tokenizer,
    chat::{Abilities, MessageForm},
};

impl Chat {
    /// Returns the body of the request that converts the conversation to tokens (vLLM's `/v1/chat/completions/render`). `ids` are the
    /// identities of the images. The body has only what the chat template reads.
    ///
    /// # Errors
    /// A text would be read as a control token or an image, or a parameter cannot be combined with images.
    pub fn rendering(&self, model: &ServedModel, ids: &[String]) -> Result<Vec<u8>, RequestError> {
        let param = self.names.prompt;
        let of_options = [
            ("truncate_prompt_tokens", self.options.truncation.is_some()),
            ("prompt_logprobs", self.options.prompt_logprobs.is_some()),
        ];
        if let Some((name, _)) = of_options.iter().find(|(_, is_set)| *is_set) {
            return Err(rule(*name, "cannot be combined with images"));
        }
        let guard = Tokenizer::guard(std::iter::empty()).expect("no text uses a guard");
        let (mut texts, mut has_control_token) = (self.conversation.clone(), false);
        texts.for_each_text(&mut |text| has_control_token |= matches!(model.tokenizer.mark(text, guard), Cow::Owned(_)));
        if has_control_token {
            let text =
                "has the name of a control token of the model, which is not possible together with images; write it differently";
            return Err(rule(param, text));
        }
        let abilities = model.template.as_deref().map_or_else(Abilities::default, |template| template.abilities());
        // The renderer reads the arguments of calls as text and converts them for the template.
        let tools = abilities.tools.map(|form| MessageForm { text_arguments: true, ..form });
        let mut variables = self.conversation.variables(Abilities { tools, ..abilities });
        let mut take = |name: &str| variables.remove(name).unwrap_or_default();
        let (mut messages, tools, documents) = (take("messages"), take("tools"), take("documents"));
        let begins_answer = take("add_generation_prompt");
        let mut images = self.images.list.iter().zip(ids);
        let mut next_image = || {
            let (ImagePart { media_type, base64, .. }, id) = images.next()?;
            let url = format!("data:{media_type};base64,{base64}");
            Some(json!({ "type": "image_url", "image_url": { "url": url }, "uuid": id }))
        };
        for message in messages.as_array_mut().into_iter().flatten() {
            let Some(text) = message["content"].as_str().filter(|text| text.contains(MARK)) else { continue };
            let parts = text.split_inclusive([MARK, BREAK]).flat_map(|piece| {
                let text = piece.trim_end_matches([MARK, BREAK]);
                let text = (!text.is_empty()).then(|| Some(json!({ "type": "text", "text": text })));
                text.into_iter().chain(piece.ends_with(MARK).then(&mut next_image))
            });
            let parts = parts.collect::<Option<Vec<Value>>>();
            message["content"] = parts.ok_or_else(|| rule(param, OTHER_MARK))?.into();
        }
        if next_image().is_some() {
            return Err(rule(param, OTHER_MARK));
        }
        let mut body = json!({
            "messages": messages, "add_generation_prompt": begins_answer,
            "continue_final_message": self.conversation.template.continue_final_message, "chat_template_kwargs": variables,
            // Without this, the answer has the pixels of the images.
            "mm_payload": "none",
        });
        if !tools.is_null() {
            // The template renders the tools also with this choice. With any other one, the server needs a parser of calls.
            (body["tools"], body["tool_choice"]) = (tools, "none".into());
        }
        if !documents.is_null() {
            body["documents"] = documents;
        }
        serde_json::to_vec(&body).map_err(|_| RequestError::Failed)
    }

    /// Returns the conversation that a renderer has converted to these tokens.
    pub fn rendered(&self, model: &ServedModel, tokens: Vec<TokenId>) -> Encoded {
        let end = model.tokenizer.decode(&tokens[tokens.len().saturating_sub(END_TOKENS)..]);
        Encoded { format: self.output_format(model, &end), tokens }
    }
}
