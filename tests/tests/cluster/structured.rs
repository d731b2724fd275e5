//! Tests of structured outputs in a whole cluster: every finished answer meets its constraint, on every path.

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, stream};
use serde_json::{Value, json};
use tandem::settings::PrefillPlace;
use tandem_tests::{
    Client, Endpoint, TestCluster, cpu_settings,
    schemas::{self, Schema},
    sim_settings, start, with_prefill,
};

/// Returns the texts of the choices that ended before the limit of tokens.
fn finished(answer: &tandem_tests::Answer) -> Vec<String> {
    let choices = answer.last()["choices"].as_array().into_iter().flatten();
    let stopped = choices.filter(|choice| choice["finish_reason"] == "stop");
    stopped.map(|choice| choice["message"]["content"].as_str().unwrap_or_default().to_owned()).collect()
}

/// Sends a request for each schema. Returns the number of finished answers, each of which must be valid.
async fn check_schemas(cluster: &TestCluster, schemas: &[Schema], options: &Value, concurrent: usize) -> Result<usize> {
    let client = Client::new(cluster.frontend());
    let requests = (0..).zip(schemas).map(|(seed, schema)| {
        let (client, model) = (client.clone(), cluster.model_id());
        async move {
            let mut request = schema.request(&model, 300, seed);
            request
                .as_object_mut()
                .context("the body is not an object")?
                .extend(options.as_object().cloned().unwrap_or_default());
            let answer = client.answer(Endpoint::Chat.path(), &request).await?;
            ensure!(answer.status == 200, "{}: {answer:?}", schema.name);
            let texts = finished(&answer);
            texts.iter().try_for_each(|text| schema.check(text))?;
            Ok(texts.len())
        }
    });
    let finished: Vec<Result<usize>> = stream::iter(requests).buffer_unordered(concurrent).collect().await;
    finished.into_iter().sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finished_answers_are_valid_by_their_schemas() -> Result<()> {
    let schemas = schemas::all();
    assert_eq!(schemas.len(), 200);
    for (place, options, part) in [
        (PrefillPlace::Remote, json!({ "temperature": 1, "max_tokens": 2_000 }), 1),
        (PrefillPlace::Local, json!({ "temperature": 1.5, "n": 2, "logprobs": true, "top_logprobs": 2, "max_tokens": 2_000 }), 4),
    ] {
        let cluster = start(with_prefill(place, sim_settings())).await?;
        let some: Vec<Schema> = schemas.iter().step_by(part).cloned().collect();
        let finished = check_schemas(&cluster, &some, &options, 16).await?;
        // A schema may allow answers of any length, so some answers reach the limit of tokens.
        assert!(finished * 10 > some.len() * 7, "only {finished} of {} answers have ended", some.len());
        cluster.assert_idle().await?;
        cluster.stop().await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn real_model_answers_with_valid_json() -> Result<()> {
    let Some(settings) = cpu_settings() else { return Ok(()) };
    let cluster = start(settings).await?;
    let some: Vec<Schema> = schemas::all().into_iter().step_by(16).collect();
    let finished = check_schemas(&cluster, &some, &json!({ "max_tokens": 120 }), 4).await?;
    assert!(finished * 2 > some.len(), "only {finished} of {} answers have ended", some.len());
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_constraint_parameter_works_on_both_endpoints() -> Result<()> {
    let cluster = start(sim_settings()).await?;
    let client = Client::new(cluster.frontend());
    let schema = json!({ "type": "integer", "minimum": 10, "maximum": 99 });
    let two_digits = |text: &str| text.trim().parse().is_ok_and(|number| (10..100).contains(&number));
    let tag = json!({ "type": "structural_tag", "format": { "type": "const_string", "value": "42" } });
    for options in [
        json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "n", "schema": schema } } }),
        json!({ "response_format": tag }),
        json!({ "structured_outputs": { "json": schema } }),
        json!({ "structured_outputs": { "regex": "[1-9][0-9]" } }),
        json!({ "structured_outputs": { "choice": ["12", "34"] } }),
        json!({ "structured_outputs": { "grammar": "root ::= [1-9] [0-9]" } }),
        json!({ "structured_outputs": { "structural_tag": tag.to_string() } }),
        json!({ "guided_json": schema }),
        json!({ "guided_regex": "[1-9][0-9]" }),
        json!({ "guided_choice": ["12", "34"] }),
        json!({ "guided_grammar": "start: /[1-9][0-9]/" }),
        json!({ "structural_tag": tag }),
        json!({ "json_schema": schema.to_string() }),
        json!({ "regex": "[1-9][0-9]" }),
        json!({ "ebnf": "root ::= \"7\" digit\ndigit ::= [0-9]" }),
        json!({ "grammar": "root ::= [1-9] [0-9]" }),
    ] {
        for endpoint in [Endpoint::Chat, Endpoint::Completions] {
            for stream in [false, true] {
                let mut request = endpoint.request(&cluster.model_id(), "a number", options.clone());
                (request["max_tokens"], request["stream"]) = (100.into(), stream.into());
                let answer = client.answer(endpoint.path(), &request).await?;
                assert!(answer.status == 200 && two_digits(&answer.text(0)), "{request}: {answer:?}");
                let reasons = answer.frames.iter().map(|frame| &frame["choices"][0]["finish_reason"]);
                assert_eq!(reasons.filter(|reason| !reason.is_null()).collect::<Vec<_>>(), ["stop"], "{request}");
            }
        }
    }
    let object = json!({ "response_format": { "type": "json_object" }, "max_tokens": 400, "temperature": 1.8, "n": 8 });
    let answer = client.answer(Endpoint::Chat.path(), &Endpoint::Chat.request(&cluster.model_id(), "x", object)).await?;
    let objects = finished(&answer);
    assert!(!objects.is_empty());
    objects.iter().try_for_each(|text| serde_json::from_str::<serde_json::Map<_, _>>(text).map(drop))?;
    cluster.assert_idle().await?;
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn constraints_that_cannot_be_enforced_are_refused_with_the_part_at_fault() -> Result<()> {
    let cluster = start(sim_settings()).await?;
    let client = Client::new(cluster.frontend());
    let schema = json!({ "type": "object", "properties": { "a": { "type": "array", "contains": {} } } });
    let named =
        |strict: Value| json!({ "type": "json_schema", "json_schema": { "name": "n", "strict": strict, "schema": schema } });
    for (options, param, words) in [
        (
            json!({ "response_format": named(json!(true)) }),
            "response_format.json_schema.schema",
            vec!["$.properties.a", "'contains'"],
        ),
        (json!({ "structured_outputs": { "regex": "(" } }), "structured_outputs.regex", vec!["cannot be enforced"]),
        (json!({ "guided_grammar": "root ::= a" }), "guided_grammar", vec!["'a' is not defined"]),
        (json!({ "regex": "a", "guided_json": {} }), "regex", vec!["'guided_json'"]),
    ] {
        for endpoint in [Endpoint::Chat, Endpoint::Completions] {
            let request = endpoint.request(&cluster.model_id(), "x", options.clone());
            let answer = client.answer(endpoint.path(), &request).await?;
            let error = &answer.last()["error"];
            assert!(answer.status == 400 && error["type"] == "invalid_request_error" && error["param"] == param, "{answer:?}");
            let message = error["message"].as_str().unwrap_or_default();
            assert!(words.iter().all(|word| message.contains(word)), "{message}");
        }
    }
    let lenient = json!({ "response_format": named(json!(false)), "max_tokens": 200 });
    let answer = client.answer(Endpoint::Chat.path(), &Endpoint::Chat.request(&cluster.model_id(), "x", lenient)).await?;
    assert_eq!(answer.status, 200, "without 'strict' the keyword is ignored: {answer:?}");
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn constraint_that_leaves_no_allowed_token_is_refused_before_and_after_the_first_token() -> Result<()> {
    let cluster = start(sim_settings()).await?;
    let client = Client::new(cluster.frontend());
    // Each byte is a token of the simulator's model.
    for allowed in ["b", "a"] {
        let options = json!({ "regex": "ab", "allowed_token_ids": [allowed.as_bytes()[0]], "max_tokens": 8 });
        for endpoint in [Endpoint::Chat, Endpoint::Completions] {
            let answer = client.answer(endpoint.path(), &endpoint.request(&cluster.model_id(), "x", options.clone())).await?;
            let error = &answer.last()["error"];
            assert!(answer.status == 400 && error["code"] == "request_refused", "{allowed}: {answer:?}");
            let message = error["message"].as_str().unwrap_or_default();
            assert!(message.contains("constraint") && !message.contains("max_tokens"), "{message}");
        }
    }
    cluster.assert_idle().await?;
    cluster.stop().await;
    Ok(())
}
