//! What guests of the processor model `host` get, as QEMU expands it: whether a guest can go on on another host depends on it.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;
use tokio::time::timeout;
use vmseal_api::processor::Processor;

/// The longest that QEMU may take; it needs a tenth of a second.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The most of QEMU's answers that is read, in bytes: they have 20 kB.
const ANSWERS_MAX: u64 = 1024 * 1024;

#[derive(Deserialize)]
struct Answer {
    #[serde(rename = "return")]
    returned: Expanded,
}

#[derive(Deserialize)]
struct Expanded {
    model: Model,
}

#[derive(Deserialize)]
struct Model {
    props: Map<String, Value>,
}

/// Asks QEMU what guests get with KVM; none where it does not say.
pub async fn of_kvm_guests(qemu: &Path) -> Option<Processor> {
    match timeout(TIMEOUT, expand(qemu)).await {
        Ok(Ok(answers)) => {
            let found = read(&answers);
            if found.is_none() {
                tracing::warn!("QEMU does not say what the processor model 'host' has");
            }
            found
        }
        Ok(Err(error)) => {
            tracing::warn!(%error, "QEMU was not asked what the processor model 'host' has");
            None
        }
        Err(_) => {
            tracing::warn!("QEMU did not say in time what the processor model 'host' has");
            None
        }
    }
}

async fn expand(qemu: &Path) -> std::io::Result<Vec<u8>> {
    let mut child = Command::new(qemu)
        .args(["-nodefaults", "-no-user-config", "-display", "none"])
        .args(["-machine", "none", "-accel", "kvm", "-qmp", "stdio"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    let missing = || std::io::Error::other("its input or output is lost");
    let mut input = child.stdin.take().ok_or_else(missing)?;
    let output = child.stdout.take().ok_or_else(missing)?;
    for command in [
        json!({"execute": "qmp_capabilities"}),
        json!({
            "execute": "query-cpu-model-expansion",
            "arguments": {"type": "full", "model": {"name": "host"}},
        }),
        json!({"execute": "quit"}),
    ] {
        input.write_all(format!("{command}\n").as_bytes()).await?;
    }
    let mut answers = Vec::new();
    output.take(ANSWERS_MAX).read_to_end(&mut answers).await?;
    child.wait().await?;
    Ok(answers)
}

/// What QEMU's answers say, one on each line.
fn read(answers: &[u8]) -> Option<Processor> {
    let answer = |line: &[u8]| serde_json::from_slice::<Answer>(line).ok();
    let props = answers.split(|&byte| byte == b'\n').find_map(answer)?.returned.model.props;
    let vendor = props.get("vendor")?.as_str()?.to_owned();
    let is_there = |(name, value): (String, Value)| (value == Value::Bool(true)).then_some(name);
    Some(Processor { vendor, features: props.into_iter().filter_map(is_there).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_features_that_are_there_are_read() {
        let answers = concat!(
            r#"{"QMP": {"version": {}, "capabilities": ["oob"]}}"#,
            "\n{\"return\": {}}\n",
            r#"{"return": {"model": {"name": "host", "props": {"aes": true, "hle": false, "level": 13, "vendor": "GenuineIntel"}}}}"#,
            "\n",
        );
        let found = read(answers.as_bytes()).unwrap();
        assert_eq!(found.vendor, "GenuineIntel");
        assert_eq!(found.features.into_iter().collect::<Vec<_>>(), ["aes"]);
        assert_eq!(read(b"{\"return\": {}}\n"), None);
        assert_eq!(read(b"what is this"), None);
    }

    /// On a machine without KVM QEMU ends at once, and nothing is known.
    #[tokio::test]
    async fn qemu_answers_or_nothing_is_known() {
        let found = of_kvm_guests(Path::new("qemu-system-x86_64")).await;
        let opens = std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok();
        if !opens {
            assert_eq!(found, None);
        } else if let Some(found) = found {
            assert!(found.features.contains("lm"), "{found:?}");
        }
        assert_eq!(of_kvm_guests(Path::new("/bin/false")).await, None);
        assert_eq!(of_kvm_guests(Path::new("/nonexistent")).await, None);
    }
}
