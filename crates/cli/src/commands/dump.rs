//! Core dumps of VMs.

use vmseal_api::client::ServerClient;
use vmseal_api::model;
use vmseal_api::request::{DecryptDump, TakeDump};
use vmseal_api::size::Size;

use super::{list, task};
use crate::arguments::{self, Dump, Output};

/// Writes one.
pub async fn take(
    server: &ServerClient,
    output: Output,
    options: arguments::TakeDump,
) -> anyhow::Result<()> {
    let arguments::TakeDump { vm, name, format, decrypt_to, dry_run, wait } = options;
    let request = TakeDump { name, format: format.into(), decrypt_to };
    task::begin(server, output, &path(&vm), &request, &dry_run, &wait).await
}

pub async fn run(server: &ServerClient, output: Output, verb: Dump) -> anyhow::Result<()> {
    match verb {
        Dump::List { vm, how } => list::run(server, output, &how, &path(&vm)).await,
        Dump::Show { vm, dump, watch } => {
            let path = one(&vm, &dump);
            list::one_with(server, output, watch, details, "vm", async || server.get(&path).await)
                .await
        }
        Dump::Decrypt { vm, dump, to, dry_run, wait } => {
            let path = format!("{}/decrypt", one(&vm, &dump));
            task::begin(server, output, &path, &DecryptDump { to }, &dry_run, &wait).await
        }
        Dump::Delete { vm, dump, dry_run, wait } => {
            task::begin_deletion(server, output, &one(&vm, &dump), &dry_run, &wait).await
        }
    }
}

fn details(dump: &model::Dump) -> Vec<(&'static str, String)> {
    vec![(
        "file",
        dump.bytes.map_or_else(|| "is being written".to_owned(), |it| Size(it).to_string()),
    )]
}

fn path(vm: &str) -> String {
    format!("vms/{vm}/dumps")
}

fn one(vm: &str, dump: &str) -> String {
    format!("{}/{dump}", path(vm))
}
