//! Tests of the page at `/chat`: a conversation with a real cluster, and answers of a hostile model.

use crate::{DESK, browser::Browser, cluster, looks};
use anyhow::{Result, ensure};
use serde_json::{Value, json};
use std::net::SocketAddr;
use tandem_tests::{Client, prose, wait_until};

const MODEL: &str = tandem_model_store::DEFAULT_MODEL_ID;
const SECRET: &str = "wisteria";
/// A text with all Markdown that the page shows, and with attacks that it must not execute.
const HOSTILE: &str = r#"# A heading
**bold**, *italics*, `code <b>`, [a link](https://example.org/), [inert](javascript:document.title='owned'), ![p](https://example.org/x.png)

1. one
   - nested
2. two

```html
<script>document.title = 'owned'</script>
```

> quoted

<script>document.title='owned'</script><img src="x" onerror="document.title='owned'"><a href="javascript:document.title='owned'">y</a>
[inert](data:text/html,<script>document.title='owned'</script>) **unclosed"#;

/// Replaces the answers of the API by streams of these pieces of text. A stream ends after its pieces if `ends`, otherwise when it is
/// cancelled.
fn scripted(pieces: &[Value], ends: &str) -> String {
    format!(
        "window.fetch = async (path, {{ signal }}) => new Response(new ReadableStream({{
            start(stream) {{
                const line = (event) => stream.enqueue(new TextEncoder().encode(`data: ${{JSON.stringify(event)}}\\n\\n`));
                for (const delta of {pieces}) line({{ choices: [{{ delta }}] }});
                signal.addEventListener('abort', () => stream.error(signal.reason));
                if (!{ends}) return;
                line({{ choices: [], usage: {{ prompt_tokens: 3, completion_tokens: 2 }} }});
                stream.enqueue(new TextEncoder().encode('data: [DONE]\\n\\n'));
                stream.close();
            }},
        }}))",
        pieces = json!(pieces)
    )
}

async fn open(browser: &mut Browser, address: SocketAddr) -> Result<()> {
    browser.open(&format!("http://{address}/")).await?;
    browser
        .until("document.getElementById('state')?.textContent === 'Ready' && document.getElementById('chat-model').value !== ''")
        .await?;
    assert_eq!(browser.value("location.pathname").await?, "/chat", "/ leads to the chat");
    Ok(())
}

/// Starts a cluster and a browser that shows its chat.
async fn start() -> Result<(tandem_tests::services::Services, Client, SocketAddr, Browser)> {
    let (cluster, address) = cluster::start(MODEL, &["prefill-0"], &["decode-0"]).await?;
    let client = Client::new(address);
    wait_until("the cluster is ready", async || Ok(client.get("/ready").await?.0 == 200)).await?;
    let mut browser = Browser::start().await?;
    browser.show(DESK, "light").await?;
    open(&mut browser, address).await?;
    Ok((cluster, client, address, browser))
}

async fn say(browser: &mut Browser, text: &str) -> Result<()> {
    browser.value("document.getElementById('message').focus()").await?;
    browser.write(text).await?;
    browser.press("Enter").await
}

const ANSWERS: &str = "document.querySelectorAll('#conversation [data-field=usage]').length";

#[tokio::test(flavor = "multi_thread")]
async fn conversation_by_keyboard_has_answers_with_their_cost() -> Result<()> {
    let (_cluster, client, _, mut browser) = start().await?;
    looks::are_good(&mut browser, "chat-empty").await?;
    let temperature = tandem_model_store::chat_temperature(MODEL).map(|value| value.to_string());
    assert_eq!(browser.value("document.getElementById('chat-temperature').placeholder").await?, json!(temperature));
    browser.value("document.getElementById('chat-max').value = 20").await?;
    for turn in 1..=2 {
        browser.walk("Tab", "#message").await?;
        browser.write(&format!("{SECRET} {}", prose("chat", 100))).await?;
        browser.press("Enter").await?;
        browser.until(&format!("{ANSWERS} === {turn}")).await?;
    }
    let cached =
        browser.value("[...document.querySelectorAll('[data-cached]')].map((usage) => Number(usage.dataset.cached))").await?;
    ensure!(cached[1].as_u64() > Some(64), "the second turn did not find the first one in the cache: {cached}");
    // A short window shows the end of the conversation, and the message below it.
    browser.show((1440, 400), "light").await?;
    say(&mut browser, "and a third one").await?;
    browser.until(&format!("{ANSWERS} === 3")).await?;
    let visible = "['#message', '#conversation > li:last-child .cost'].every((place) => document.querySelector(place).getBoundingClientRect().bottom <= innerHeight)";
    browser.until(visible).await?;
    browser.show(DESK, "light").await?;
    // The answer is copied with the keyboard.
    browser.walk("Shift+Tab", "#conversation > li:last-child .cost .copy").await?;
    browser.press("Enter").await?;
    browser.until("document.activeElement.textContent === 'Copied'").await?;
    let copied = browser.value("navigator.clipboard.readText()").await?;
    let shown = browser.value("document.querySelector('#conversation > li:last-child .text').textContent").await?;
    let words = |text: &Value| text.as_str().map(|text| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
    ensure!(words(&copied).is_some_and(|words| !words.is_empty()) && words(&copied) == words(&shown), "{copied} is not {shown}");
    looks::are_good(&mut browser, "chat").await?;
    for path in ["/dashboard/cluster", "/dashboard/requests", "/dashboard/history"] {
        ensure!(!client.get(path).await?.1.contains(SECRET), "{path} contains a message");
    }
    browser.walk("Tab", "#chat-clear").await?;
    browser.press("Enter").await?;
    assert_eq!(browser.value("document.getElementById('conversation').textContent").await?, "");
    assert_eq!(browser.value("localStorage.length + sessionStorage.length").await?, 0);
    // An example is a message.
    browser.walk("Shift+Tab", "#examples button").await?;
    browser.press("Enter").await?;
    browser.until(&format!("{ANSWERS} === 1")).await?;
    assert_eq!(browser.console_errors(), [] as [String; 0]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn markdown_of_a_hostile_answer_is_shown_and_stays_inert() -> Result<()> {
    let (_cluster, _, _, mut browser) = start().await?;
    // The text arrives in pieces, which may end within a mark.
    let letters: Vec<char> = HOSTILE.chars().collect();
    let pieces: Vec<Value> = letters.chunks(5).map(|piece| json!({ "content": piece.iter().collect::<String>() })).collect();
    let thought = json!({ "reasoning_content": "<img src=x onerror=\"document.title='owned'\">" });
    browser.value(&scripted(&[&[thought][..], &pieces].concat(), "true")).await?;
    say(&mut browser, "<img src=x onerror=\"document.title='owned'\">").await?;
    browser.until(&format!("{ANSWERS} === 1")).await?;
    let texts = |selector: &str| format!("[...document.querySelectorAll('.text {selector}')].map((place) => place.textContent)");
    for (selector, expected) in [
        ("h2", json!(["A heading"])),
        ("strong", json!(["bold"])),
        ("em", json!(["italics"])),
        (":not(pre) > code", json!(["code <b>"])),
        ("pre > code", json!(["<script>document.title = 'owned'</script>"])),
        ("ol > li > ul > li", json!(["nested"])),
        ("ol > li", json!(["onenested", "two"])),
        ("blockquote", json!(["quoted"])),
        ("a", json!(["a link"])),
        ("img, .text script, .text iframe, .text [onerror]", json!([])),
    ] {
        assert_eq!(browser.value(&texts(selector)).await?, expected, "{selector}");
    }
    assert_eq!(browser.value("document.querySelector('.text a').href").await?, "https://example.org/");
    assert_eq!(browser.value("document.querySelectorAll('img, body script').length").await?, 0);
    let shown = browser.value("document.querySelector('.text').textContent").await?;
    ensure!(shown.as_str().is_some_and(|text| text.contains("[inert](javascript:") && text.ends_with("**unclosed")), "{shown}");
    looks::are_good(&mut browser, "chat-markdown").await?;
    // The time for a text of unclosed marks must not grow with the square of its length.
    let slow = "import('/chat/markdown.js').then(({ showMarkdown }) => {
        const began = performance.now();
        for (const mark of ['*', '**a', '`', '_a ', '[', '- ', '> ', '\\n- ', '(`', '~~~\\n']) showMarkdown(document.createElement('div'), mark.repeat(20_000));
        return performance.now() - began;
    })";
    let took = browser.value(slow).await?;
    ensure!(took.as_f64().is_some_and(|ms| ms < 20_000.0), "{took} ms");
    assert_eq!(browser.value("document.title").await?, "Tandem chat");
    assert_eq!(browser.console_errors(), [] as [String; 0]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn answer_is_stopped_by_key_and_by_button_and_errors_are_shown() -> Result<()> {
    let (_cluster, _, _, mut browser) = start().await?;
    browser.value(&scripted(&[json!({ "content": "It begins" })], "false")).await?;
    for (turn, by_button) in [(1, false), (2, true)] {
        say(&mut browser, "continue").await?;
        browser.until("document.querySelector('#conversation > li:last-child .text')?.textContent === 'It begins'").await?;
        assert_eq!(browser.value("document.getElementById('chat-send').disabled").await?, true);
        if by_button {
            browser.walk("Tab", "#chat-stop").await?;
            browser.press("Enter").await?;
        } else {
            browser.press("Escape").await?;
        }
        let stopped = "[...document.querySelectorAll('.problem')].filter((line) => line.textContent === 'Stopped.').length";
        browser.until(&format!("{stopped} === {turn} && !document.getElementById('chat-send').disabled")).await?;
    }
    // The server is lost within an answer, and then before one.
    let lost = "void setTimeout(() => stream.error(new TypeError('network error')), 200)";
    browser.value(&scripted(&[json!({ "content": "It begins" })], lost)).await?;
    for problem in ["The answer ended early: the connection to the server was lost", "No answer: The server does not answer"] {
        say(&mut browser, "continue").await?;
        let shown = "document.querySelector('#conversation > li:last-child .problem')?.textContent";
        browser.until(&format!("{shown} === {}", json!(problem))).await?;
        browser.value("window.fetch = async () => { throw new TypeError('Failed to fetch'); }").await?;
    }
    browser.until("document.getElementById('state').textContent === 'The server does not answer'").await?;
    // The page shows the API's own message of a refusal. If the key is missing, the page shows the field for it.
    let refusal = |status: u32, message: &str| {
        let body = json!({ "error": { "message": message } }).to_string();
        format!("window.fetch = async () => new Response({}, {{ status: {status} }})", json!(body))
    };
    assert_eq!(browser.value("document.getElementById('key-part').hidden").await?, true);
    browser.value(&refusal(401, "this server wants a key")).await?;
    say(&mut browser, "once more").await?;
    browser.until("document.querySelector('#conversation > li:last-child .problem')?.textContent === 'No answer: this server wants a key'").await?;
    assert_eq!(browser.value("document.getElementById('key-part').hidden").await?, false);
    looks::are_good(&mut browser, "chat-stopped").await
}
