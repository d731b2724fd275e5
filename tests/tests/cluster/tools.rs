//! A test of a conversation with tools: a client calls a whole cluster with the simulated engine.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tandem_tests::{Client, Endpoint, sim_settings, start};

async fn answer(client: &Client, model: &str, messages: &Value, choice: Value) -> Result<Value> {
    let parameters = json!({
        "type": "object", "properties": { "city": { "type": "string", "maxLength": 8 } }, "required": ["city"], "additionalProperties": false,
    });
    let tool = json!({ "type": "function", "function": { "name": "weather", "description": "Today's weather", "parameters": parameters } });
    let options =
        json!({ "messages": messages, "tools": [tool], "tool_choice": choice, "parallel_tool_calls": false, "max_tokens": 400 });
    let body = Endpoint::Chat.request(model, "", options);
    Ok(client.answer(Endpoint::Chat.path(), &body).await?.last().clone())
}

#[tokio::test]
async fn model_calls_a_tool_and_reads_its_result() -> Result<()> {
    let cluster = start(sim_settings()).await?;
    let (model, client) = (cluster.model_id(), Client::new(cluster.frontend()));
    let mut messages = json!([{ "role": "user", "content": "What is the weather like in Köln?" }]);
    for choice in [json!("required"), json!({ "type": "function", "function": { "name": "weather" } })] {
        let first = answer(&client, &model, &messages, choice.clone()).await?;
        ensure!(first["choices"][0]["finish_reason"] == "tool_calls", "{first}");
        let message = &first["choices"][0]["message"];
        let call = &message["tool_calls"][0];
        ensure!(call["function"]["name"] == "weather", "{first}");
        let arguments: Value =
            serde_json::from_str(call["function"]["arguments"].as_str().context("the arguments are no text")?)?;
        ensure!(arguments["city"].is_string(), "{arguments}");

        let result = json!({ "role": "tool", "tool_call_id": call["id"], "content": "17 °C" });
        let history = messages.as_array_mut().context("the messages are no list")?;
        history.extend([message.clone(), result]);
        let second = answer(&client, &model, &messages, json!("auto")).await?;
        let tokens = |pointer: &str| second["usage"].pointer(pointer).and_then(Value::as_u64).unwrap_or_default();
        let before = first["usage"]["prompt_tokens"].as_u64().context("the usage has no prompt tokens")?;
        // The second prompt begins with the first one, whose full blocks are cached.
        ensure!(tokens("/prompt_tokens_details/cached_tokens") >= before - 16, "{second}");
        ensure!(tokens("/prompt_tokens") > before, "{second}");
        let history = messages.as_array_mut().context("the messages are no list")?;
        history.push(second["choices"][0]["message"].clone());
        history.push(json!({ "role": "user", "content": "And tomorrow?" }));
    }
    cluster.assert_usage_reconciles(&client).await?;
    cluster.assert_idle().await
}
