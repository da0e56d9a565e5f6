//! What each command does.

mod adopt;
mod backup;
mod bitmap;
mod cdrom;
mod ceph;
mod confirm;
mod console;
mod datastore;
mod datastore_key;
mod datastore_remount;
mod datastore_way;
mod disk;
mod doctor;
mod drain;
mod dump;
mod evacuate;
mod events;
mod existing_pools;
mod expose;
mod follow;
mod guest;
mod host;
mod image;
mod import;
mod init;
mod kmip;
mod lab;
mod launch;
mod list;
mod log_level;
mod mirror;
mod nic;
mod policy;
mod processes;
mod progress;
mod prove;
mod provider;
mod provider_secret;
mod reconnect;
mod remote;
mod replica;
mod server_backup;
mod several;
mod snapshot;
mod ssh;
mod task;
mod top;
mod vm;
mod vnc;

use vmseal_api::request_id;
use vmseal_secret::process::Hardening;

use crate::arguments::{Arguments, Command, Global, Server, ServerCommand};
use crate::{completion, connection, man, print};

/// Carries out the command line.
pub async fn run(arguments: Arguments, hardening: Hardening) -> anyhow::Result<()> {
    let Arguments { global, command } = arguments;
    // Roles first: they need no server to talk to.
    let command = match command {
        Command::Server(Server { command: None, run }) => {
            return processes::server(run, hardening).await;
        }
        Command::Server(Server {
            command: Some(ServerCommand::Restore { from, data_dir, passphrase, dry_run }),
            ..
        }) => {
            return server_backup::restore(global.output, &from, &data_dir, &passphrase, dry_run)
                .await;
        }
        Command::Agent(options) => return processes::agent(options, hardening).await,
        Command::Lab(verb) => return lab::run(global.output, verb).await,
        Command::Doctor(options) => return doctor::run(global.output, options, hardening).await,
        Command::Init(options) => return init::run(global, options, hardening).await,
        Command::Completion(options) => return print::print(&completion::script(options.shell)?),
        Command::Man(options) => return man::write(&options.dir),
        Command::Image(verb) => return image::run(global.output, verb),
        other => other,
    };
    let request = global.request_id.clone().unwrap_or_default();
    request_id::during(Some(request), ask(global, command)).await
}

/// Carries out what the server is asked for.
async fn ask(global: Global, command: Command) -> anyhow::Result<()> {
    if let Command::Login(options) = command {
        return connection::login(&global, &options).await;
    }
    let server = connection::connect(&global)?;
    let output = global.output;
    match command {
        Command::Host(verb) => host::run(&server, output, verb).await,
        Command::Datastore(verb) => datastore::run(&server, output, verb).await,
        Command::Events(options) => events::run(&server, output, &options).await,
        Command::Alarms(how) => list::run(&server, output, &how, "alarms").await,
        Command::Provider(verb) => provider::run(&server, output, verb).await,
        Command::Policy(verb) => policy::run(&server, output, verb).await,
        Command::Remote(verb) => remote::run(&server, output, verb).await,
        Command::Vm(verb) => vm::run(server, output, verb).await,
        Command::Disk(verb) => disk::run(server, output, verb).await,
        Command::Nic(verb) => nic::run(&server, output, verb).await,
        Command::Snapshot(verb) => snapshot::run(&server, output, verb).await,
        Command::Backup(verb) => backup::run(&server, output, verb).await,
        Command::Dump(verb) => dump::run(&server, output, verb).await,
        Command::Task(verb) => task::run(&server, output, verb).await,
        Command::Server(Server { command: Some(ServerCommand::LogLevel { levels }), .. }) => {
            log_level::run(&server, output, "log-level", levels).await
        }
        Command::Server(Server {
            command: Some(ServerCommand::Backup { to, passphrase, dry_run }),
            ..
        }) => server_backup::back_up(&server, output, &to, &passphrase, dry_run).await,
        Command::Server(_)
        | Command::Agent(_)
        | Command::Login(_)
        | Command::Doctor(_)
        | Command::Init(_)
        | Command::Completion(_)
        | Command::Man(_)
        | Command::Image(_)
        | Command::Lab(_) => {
            unreachable!("carried out above")
        }
    }
}
