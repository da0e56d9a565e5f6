//! Lists of resources.

use serde::de::DeserializeOwned;
use vmseal_api::client::ServerClient;

use crate::arguments::{List, Output};
use crate::print::{self, Row};

/// Prints the list at `path` of the API.
pub async fn run<T: Row + DeserializeOwned>(
    server: &ServerClient,
    output: Output,
    how: &List<T>,
    path: &str,
) -> anyhow::Result<()> {
    print::list(output, how, server.all(path).await?)
}
