//! A headless Chromium with one page. The tests control it over its DevTools protocol on a pair of pipes.

use anyhow::{Context, Result, anyhow, bail, ensure};
use base64::{Engine, prelude::BASE64_STANDARD};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

/// Time limit for each reply of the browser. On a busy machine it may start slowly.
const TIMEOUT: Duration = Duration::from_secs(120);
/// The interval of polling for a state that cannot be awaited.
const POLL_INTERVAL: Duration = Duration::from_millis(30);
/// The maximum number of times that Tab is pressed to reach an element of a page.
const STEPS_MAX: u32 = 80;

/// Runs the browser with the protocol's pipes as its file descriptors 3 and 4.
const SHELL: &str = r#"exec "$@" 3<&0 4>&1 </dev/null >/dev/null"#;

/// `--no-sandbox` is needed when the tests run as root. It is safe because the browser opens no page but ours.
const FLAGS: [&str; 9] = [
    "--headless",
    "--no-sandbox",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-proxy-server",
];

/// A running Chromium. Dropping this value kills the process.
pub struct Browser {
    process: Child,
    requests: ChildStdin,
    replies: mpsc::UnboundedReceiver<Value>,
    calls: u64,
    session: Option<String>,
    console_errors: Vec<String>,
    folder: TempDir,
}

impl Browser {
    /// Starts Chromium and opens an empty page.
    pub async fn start() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut command = Command::new("sh");
        command.args(["-c", SHELL, "sh", "chromium"]).args(FLAGS);
        command.arg(format!("--user-data-dir={}", folder.path().display()));
        command.env("HOME", folder.path());
        let log = File::create(folder.path().join("log"))?;
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log).spawn()?;
        let (requests, output) =
            (process.stdin.take().context("the pipe is missing")?, process.stdout.take().context("the pipe is missing")?);
        let (sender, replies) = mpsc::unbounded_channel();
        std::thread::spawn(move || {
            for message in BufReader::new(output).split(0) {
                let Ok(reply) = message.and_then(|bytes| Ok(serde_json::from_slice(&bytes)?)) else { return };
                if sender.send(reply).is_err() {
                    return;
                }
            }
        });
        let (calls, session, console_errors) = (0, None, Vec::new());
        let mut browser = Self { process, requests, replies, calls, session, console_errors, folder };
        // The pages may read what they have copied.
        browser
            .call("Browser.grantPermissions", json!({ "permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"] }))
            .await?;
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" })).await?;
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session = browser.call("Target.attachToTarget", attach).await?;
        browser.session = session["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), json!({})).await?;
        }
        Ok(browser)
    }

    pub async fn call(&mut self, method: &str, params: Value) -> Result<Value> {
        self.calls += 1;
        let mut request = json!({ "id": self.calls, "method": method, "params": params });
        if let Some(session) = &self.session {
            request["sessionId"] = session.as_str().into();
        }
        let sent = self.requests.write_all(format!("{request}\0").as_bytes());
        sent.map_err(|_| self.closed_error())?;
        loop {
            let reply = timeout(TIMEOUT, self.replies.recv()).await.with_context(|| format!("{method} takes too long"))?;
            let Some(reply) = reply else { return Err(self.closed_error()) };
            if reply["id"] == self.calls {
                ensure!(reply["error"].is_null(), "{method}: {}", reply["error"]);
                return Ok(reply["result"].clone());
            }
            self.console_errors.extend(console_error(&reply));
        }
    }

    fn closed_error(&mut self) -> anyhow::Error {
        let log = fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
        anyhow!("Chromium has ended ({:?}); if it is missing: apt-get install chromium\n{log}", self.process.try_wait())
    }

    pub async fn open(&mut self, url: &str) -> Result<()> {
        let opened = self.call("Page.navigate", json!({ "url": url })).await?;
        ensure!(opened["errorText"].is_null(), "{url}: {}", opened["errorText"]);
        Ok(())
    }

    /// Evaluates an expression in the page, and awaits it if it is a promise.
    pub async fn value(&mut self, expression: &str) -> Result<Value> {
        let params = json!({
            "expression": expression, "awaitPromise": true, "returnByValue": true,
            // The expression is subject to the page's content security policy, too.
            "allowUnsafeEvalBlockedByCSP": false,
        });
        let found = self.call("Runtime.evaluate", params).await?;
        if !found["exceptionDetails"].is_null() {
            bail!("{expression}: {}", found["exceptionDetails"]["exception"]["description"]);
        }
        Ok(found["result"]["value"].clone())
    }

    pub async fn until(&mut self, expression: &str) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        while self.value(expression).await? != true {
            if Instant::now() > deadline {
                let page = self.value("document.body.innerText").await?;
                bail!("timed out waiting until {expression}\n{:?}\n{}", self.console_errors, page.as_str().unwrap_or_default());
            }
            sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Presses the key with this name of `KeyboardEvent.key`, after `Shift+` if that key is held.
    pub async fn press(&mut self, key: &str) -> Result<()> {
        let (modifiers, key) = key.strip_prefix("Shift+").map_or((0, key), |key| (8, key));
        let (code, text) = match key {
            "Tab" => (9, None),
            "Enter" => (13, Some("\r")),
            "Escape" => (27, None),
            other => bail!("the key {other} is not supported"),
        };
        let mut event =
            json!({ "type": "rawKeyDown", "key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers });
        if let Some(text) = text {
            (event["type"], event["text"]) = ("keyDown".into(), text.into());
        }
        self.call("Input.dispatchKeyEvent", event.clone()).await?;
        event["type"] = "keyUp".into();
        self.call("Input.dispatchKeyEvent", event).await.map(drop)
    }

    /// Presses a key, `Tab` or `Shift+Tab`, until an element that matches the selector has the focus.
    pub async fn walk(&mut self, key: &str, selector: &str) -> Result<()> {
        let found = format!("document.activeElement.matches({})", json!(selector));
        for _ in 0..STEPS_MAX {
            self.press(key).await?;
            if self.value(&found).await? == true {
                return Ok(());
            }
        }
        bail!("{key} does not lead to {selector}")
    }

    pub async fn write(&mut self, text: &str) -> Result<()> {
        self.call("Input.insertText", json!({ "text": text })).await.map(drop)
    }

    /// Shows the page in a window of this size and in a colour scheme, `light` or `dark`.
    pub async fn show(&mut self, (width, height): (u32, u32), scheme: &str) -> Result<()> {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600 });
        self.call("Emulation.setDeviceMetricsOverride", size).await?;
        let scheme = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.call("Emulation.setEmulatedMedia", scheme).await.map(drop)
    }

    /// Returns a screenshot as a PNG. It shows the whole page if `whole` is true, otherwise the window.
    pub async fn picture(&mut self, whole: bool) -> Result<Vec<u8>> {
        let shot = self.call("Page.captureScreenshot", json!({ "format": "png", "captureBeyondViewport": whole })).await?;
        Ok(BASE64_STANDARD.decode(shot["data"].as_str().context("the screenshot has no data")?)?)
    }

    pub fn console_errors(&self) -> &[String] {
        &self.console_errors
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Chromium's other processes end with this process. Killing fails if the process has already ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns the error or warning that an event reports; `None` if it reports neither.
fn console_error(event: &Value) -> Option<String> {
    let params = &event["params"];
    let bad = match event["method"].as_str()? {
        "Runtime.exceptionThrown" => &params["exceptionDetails"],
        "Runtime.consoleAPICalled" if matches!(params["type"].as_str(), Some("error" | "warning" | "assert")) => &params["args"],
        "Log.entryAdded" if matches!(params["entry"]["level"].as_str(), Some("error" | "warning")) => &params["entry"],
        _ => return None,
    };
    Some(bad.to_string())
}
