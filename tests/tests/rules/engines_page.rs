//! Checks that the commands in docs/engines.md and docs/gateway.md are valid, and that the messages that docs/engines.md explains exist.

use anyhow::{Context, Result, anyhow, ensure};
use serde::Deserialize;
use serde_json::Value;
use tandem::cli::Cli;
use tandem_tests::workspace::{files, root, text};

fn page() -> String {
    text(&root().join("docs/engines.md"))
}

#[test]
fn commands_in_the_documents_about_engines_are_valid() -> Result<()> {
    let page = page() + &text(&root().join("docs/gateway.md"));
    let page = page.replace("\\\n", " ");
    let mut commands: Vec<String> = page.lines().filter(|line| line.starts_with("tandem ")).map(str::to_owned).collect();
    commands.extend(commands_of_pods()?);
    ensure!(commands.len() >= 5, "only {commands:?} were found");
    for command in commands {
        let args = command.split_whitespace().map(Into::into).collect();
        Cli::read(args, None).map_err(|error| anyhow!("{command}: {error}"))?;
    }
    Ok(())
}

/// Returns the commands of Tandem's containers in the manifest for gateways.
fn commands_of_pods() -> Result<Vec<String>> {
    let manifest = text(&root().join("deploy/gateway/kubernetes.yaml"));
    let mut commands = Vec::new();
    for object in yaml_serde::Deserializer::from_str(&manifest).map(Value::deserialize) {
        let containers = object?["spec"]["template"]["spec"]["containers"].clone();
        for container in containers.as_array().into_iter().flatten().filter(|container| container["name"] != "vllm") {
            let args = container["args"].as_array().into_iter().flatten().filter_map(Value::as_str);
            let args: Vec<&str> = args.filter(|arg| !arg.starts_with("--cluster-key-file=")).collect();
            commands.push(format!("tandem {}", args.join(" ")).replace("$(POD_IP)", "10.1.2.3"));
        }
    }
    ensure!(commands.len() == 3, "{commands:?}");
    Ok(commands)
}

#[test]
fn messages_explained_in_the_engines_document_exist() -> Result<()> {
    let page = page();
    let (_, section) = page.split_once("## Troubleshooting").context("the page has no section Troubleshooting")?;
    let table = section.split("\n## ").next().unwrap_or_default();
    let cells = table.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    let messages: Vec<&str> = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
    ensure!(messages.len() >= 15, "only {messages:?} were found");
    let is_code = |file: &std::path::PathBuf| file.extension().is_some_and(|extension| extension == "rs");
    let lines = |code: String| code.split("\\\n").map(str::trim_start).collect::<String>();
    let code: String = files(&root()).into_iter().filter(is_code).map(|file| lines(text(&file))).collect();
    let missing: Vec<&str> = messages.into_iter().filter(|message| !code.contains(message)).collect();
    ensure!(missing.is_empty(), "docs/engines.md explains messages that do not exist: {missing:?}");
    Ok(())
}
