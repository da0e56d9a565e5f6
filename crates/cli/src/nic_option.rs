//! The value of `--nic`: `user[,forward=FORWARD]...`, `bridge=NAME` or `tap=NAME`, and what is the same for all of them.

use anyhow::{Context, bail, ensure};
use vmseal_api::nic::{MacAddress, NicBackend, NicLink, NicModel, PortForward};
use vmseal_api::request::CreateNic;

use crate::exit::{Ended, Exit};

/// Parses each `--nic`, in order.
pub fn parse_all(options: &[String]) -> anyhow::Result<Vec<CreateNic>> {
    options.iter().map(|option| parse(option)).collect()
}

/// Parses one `--nic`.
pub fn parse(option: &str) -> anyhow::Result<CreateNic> {
    let refused = |why: anyhow::Error| Ended::new(Exit::Usage, format!("--nic {option}: {why:#}"));
    Ok(split(option).map_err(refused)?)
}

/// The keys of `--nic` that say what a card is connected to.
const CONNECTION: [&str; 4] = ["user", "bridge", "tap", "forward"];

/// Parses what `--nic` says of a card's connection, and nothing else.
pub fn connection(text: &str) -> anyhow::Result<NicBackend> {
    for part in text.split(',') {
        let Some((key, _)) = part.split_once('=') else { continue };
        ensure!(
            CONNECTION.contains(&key),
            "'{key}' is no part of a connection; known are {}",
            CONNECTION.join(", ")
        );
    }
    Ok(split(text)?.backend)
}

fn split(option: &str) -> anyhow::Result<CreateNic> {
    let (mut backend, mut mac, mut model, mut name, mut link) = (None, None, None, None, None);
    let mut forwards: Vec<PortForward> = Vec::new();
    for part in option.split(',') {
        let (key, value) = match part.split_once('=') {
            None if part == "user" => (part, ""),
            None => bail!("'{part}' is not user and not of the form key=value"),
            Some((key, value)) => {
                ensure!(!value.is_empty(), "'{key}' has no value");
                (key, value)
            }
        };
        let text = value.to_owned();
        let taken = match key {
            "user" if value.is_empty() => {
                backend.replace(NicBackend::User { forwards: Vec::new() }).is_some()
            }
            "bridge" => backend.replace(NicBackend::Bridge { bridge: text }).is_some(),
            "tap" => backend.replace(NicBackend::Tap { tap: text }).is_some(),
            "forward" => {
                forwards.push(value.parse().map_err(anyhow::Error::msg)?);
                false
            }
            "mac" => mac.replace(value.parse::<MacAddress>()?).is_some(),
            "model" => model.replace(model_of(value)?).is_some(),
            "name" => name.replace(text).is_some(),
            "link" => link.replace(link_of(value)?).is_some(),
            _ => bail!(
                "there is no '{key}'; known are user, bridge, tap, forward, mac, model, name and link"
            ),
        };
        ensure!(
            !taken,
            "it has {} twice: one of user, bridge=NAME and tap=NAME, and each key once",
            if matches!(key, "user" | "bridge" | "tap") { "a connection" } else { key }
        );
    }
    let mut backend = backend.context("give user, bridge=NAME or tap=NAME")?;
    match &mut backend {
        NicBackend::User { forwards: of } => *of = forwards,
        NicBackend::Bridge { .. } | NicBackend::Tap { .. } => ensure!(
            forwards.is_empty(),
            "'forward' is for user alone: a guest on a bridge or a tap is reached at its own address"
        ),
    }
    let (model, link) = (model.unwrap_or_default(), link.unwrap_or_default());
    Ok(CreateNic { name, mac, model, backend, link })
}

fn model_of(text: &str) -> anyhow::Result<NicModel> {
    let found = NicModel::ALL.into_iter().find(|model| model.name() == text);
    found.with_context(|| format!("'{text}' is not a model: virtio or e1000e"))
}

/// Reads `up` or `down`.
pub fn link_of(text: &str) -> anyhow::Result<NicLink> {
    let found = NicLink::ALL.into_iter().find(|link| link.name() == text);
    found.with_context(|| format!("'{text}' is not a link: up or down"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_typed_becomes_a_card() {
        let card = parse("user,forward=tcp:2222:22,forward=udp:53").unwrap();
        let forwards: Vec<_> = card.backend.forwards().iter().map(ToString::to_string).collect();
        assert_eq!(forwards, ["tcp:127.0.0.1:2222:22", "udp:127.0.0.1:0:53"]);
        assert_eq!((card.name, card.mac, card.model), (None, None, NicModel::Virtio));
        let card =
            parse("mac=52:54:00:12:34:56,bridge=br0,model=e1000e,name=lan,link=down").unwrap();
        assert_eq!(card.backend, NicBackend::Bridge { bridge: "br0".to_owned() });
        assert_eq!(card.mac.unwrap().to_string(), "52:54:00:12:34:56");
        assert_eq!((card.model, card.link), (NicModel::E1000e, NicLink::Down));
        assert_eq!(card.name.as_deref(), Some("lan"));
        assert_eq!(parse("tap=t0").unwrap().backend, NicBackend::Tap { tap: "t0".to_owned() });
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (option, named) in [
            ("", "''"),
            ("none", "'none'"),
            ("mac=52:54:00:12:34:56", "bridge=NAME"),
            ("bridge=", "no value"),
            ("bridge=a,tap=b", "a connection twice"),
            ("user,user", "a connection twice"),
            ("user,colour=red", "'colour'"),
            ("user,mac=x", "'x'"),
            ("user,model=ne2k", "'ne2k'"),
            ("user,link=off", "'off'"),
            ("user,forward=22", "'22'"),
            ("user,name=a,name=b", "name twice"),
            ("bridge=br0,forward=tcp:22", "user alone"),
        ] {
            let message = format!("{:#}", parse(option).unwrap_err());
            assert!(message.contains(named) && message.contains("--nic"), "{option}: {message}");
        }
    }
}
