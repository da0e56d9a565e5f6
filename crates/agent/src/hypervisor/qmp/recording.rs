//! A monitor for tests, which takes every command and keeps it.

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixListener;
use tokio::task::JoinHandle;

use super::Qmp;

/// A connection to such a monitor, and the commands that it has taken when the connection ends.
pub async fn connect() -> (Qmp, JoinHandle<Vec<Value>>) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp");
    let monitor = tokio::spawn(take_all(UnixListener::bind(&path).unwrap()));
    // It has no events, and the socket's file is not needed once it is connected.
    let (qmp, _) = Qmp::connect(&path).await.unwrap();
    (qmp, monitor)
}

async fn take_all(listener: UnixListener) -> Vec<Value> {
    let (reader, mut writer) = listener.accept().await.unwrap().0.into_split();
    writer.write_all(b"{\"QMP\": {}}\n").await.unwrap();
    let (mut lines, mut taken) = (BufReader::new(reader).lines(), Vec::new());
    while let Ok(Some(line)) = lines.next_line().await {
        let command: Value = serde_json::from_str(&line).unwrap();
        let answer = json!({"return": {}, "id": command["id"]});
        writer.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
        taken.push(command);
    }
    taken
}
