//! Secrets of a key provider, sealed for the server.

use vmseal_api::client::ServerClient;
use vmseal_api::model::{About, Provider};
use vmseal_api::passphrase::SealedPassphrase;
use vmseal_secret::SecretBytes;

use crate::passphrase;

/// Seals a passphrase or a key of `provider`, which is given by its name or id.
pub async fn sealed(
    server: &ServerClient,
    provider: &str,
    secret: &SecretBytes,
) -> anyhow::Result<SealedPassphrase> {
    let about: About = server.get("about").await?;
    // It is sealed for the name even if the command has the id.
    passphrase::seal(secret, &name_of(server, provider).await, &about.passphrase_box)
}

/// The name of a provider given by name or id; what was given when it does not exist yet.
async fn name_of(server: &ServerClient, provider: &str) -> String {
    match server.get::<Provider>(&format!("providers/{provider}")).await {
        Ok(found) => found.name,
        Err(_) => provider.to_owned(),
    }
}
