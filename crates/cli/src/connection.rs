//! Which server to talk to, and as whom: options, environment, or what `vmseal login` saved.

use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use vmseal_api::atomic_file::{self, PRIVATE};
use vmseal_api::client::ServerClient;
use vmseal_api::model::{About, Host, Page, Plan};
use zeroize::Zeroizing;

use crate::arguments::{Global, Login};
use crate::exit::{Ended, Exit};
use crate::print::{self, plan};

/// What `vmseal login` saves. Paths, not contents: the token stays in its own file.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Saved {
    pub server: Option<String>,
    pub ca: Option<PathBuf>,
    pub token_file: Option<PathBuf>,
}

/// Where `vmseal login` saves, after the XDG base directory specification.
pub fn saved_path() -> Option<PathBuf> {
    let base = std::env::var_os("XDG_CONFIG_HOME")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".config")))?;
    Some(base.join("vmseal").join("client.toml"))
}

/// What `vmseal login` saved last; nothing before the first time.
pub fn saved() -> anyhow::Result<Saved> {
    let Some(path) = saved_path() else { return Ok(Saved::default()) };
    match std::fs::read_to_string(&path) {
        Ok(text) => toml::from_str(&text)
            .with_context(|| format!("{} is damaged: run vmseal login again", path.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Saved::default()),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// The server that options, environment or `vmseal login` name, in this order.
pub fn connect(global: &Global) -> anyhow::Result<ServerClient> {
    let saved = saved()?;
    let missing = |option: &str, what: &str| {
        let message = format!(
            "no {what} is known: give --{option}, or run vmseal login once; on a machine that is to have a server, vmseal init does that"
        );
        Ended::new(Exit::NotPermitted, message)
    };
    let server = global.server.clone().or(saved.server);
    let server = server.ok_or_else(|| missing("server", "server"))?;
    let ca = global.ca.clone().or(saved.ca).ok_or_else(|| missing("ca", "authority"))?;
    let token_file = global.token_file.clone().or(saved.token_file);
    let token_file = token_file.ok_or_else(|| missing("token-file", "access token"))?;
    open(&server, &ca, &token_file)
}

/// A client of the server at this address.
pub fn open(server: &str, ca: &Path, token_file: &Path) -> anyhow::Result<ServerClient> {
    let authority = std::fs::read_to_string(ca)
        .with_context(|| format!("cannot read the authority's certificate {}", ca.display()))?;
    let token = std::fs::read_to_string(token_file)
        .map(Zeroizing::new)
        .with_context(|| format!("cannot read the token file {}", token_file.display()))?;
    Ok(ServerClient::new(server, &authority, token.trim())?)
}

/// Checks the connection and saves it.
pub async fn login(global: &Global, options: &Login) -> anyhow::Result<()> {
    let (Some(server), Some(ca), Some(token_file)) =
        (&global.server, &global.ca, &global.token_file)
    else {
        let message = "give --server, --ca and --token-file";
        return Err(Ended::new(Exit::Usage, message).into());
    };
    let absolute = |path: &Path| {
        std::path::absolute(path)
            .with_context(|| format!("cannot make {} absolute", path.display()))
    };
    let (ca, token_file) = (absolute(ca)?, absolute(token_file)?);
    if !options.no_check {
        let client = open(server, &ca, &token_file)?;
        let about: About = client.get("about").await?;
        // `about` needs no credentials; a list does.
        let _: Page<Host> = client.get("hosts").await?;
        print::say(format_args!("{server} is vmseal {}", about.vmseal));
    }
    let path = saved_path().context("there is no home directory: set HOME")?;
    if options.dry_run.dry_run {
        let steps = vec![format!("save it in {}", path.display())];
        let plan =
            Plan { kind: "login".to_owned(), target: server.clone(), steps, ..Plan::default() };
        return plan::show(global.output, &plan);
    }
    save(
        &path,
        &Saved { server: Some(server.clone()), ca: Some(ca), token_file: Some(token_file) },
    )?;
    print::say(format_args!("saved in {}", path.display()));
    Ok(())
}

/// Saves a login, whole or not at all.
pub fn save(path: &Path, login: &Saved) -> anyhow::Result<()> {
    let text = toml::to_string(login)?;
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)
            .with_context(|| format!("cannot make {}", directory.display()))?;
    }
    atomic_file::write(path, text.as_bytes(), PRIVATE)
        .with_context(|| format!("cannot write {}", path.display()))
}
