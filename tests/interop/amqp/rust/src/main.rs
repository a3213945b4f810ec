//! fe2o3-amqp under the line protocol of drivers.py: commands on standard input, answers and events on output.

mod values;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::error::Error;
use std::rc::Rc;
use std::time::Duration;

use fe2o3_amqp::connection::ConnectionHandle;
use fe2o3_amqp::link::delivery::DeliveryInfo;
use fe2o3_amqp::link::receiver::CreditMode;
use fe2o3_amqp::link::{ReceiverAttachError, SenderAttachError};
use fe2o3_amqp::sasl_profile::{SaslProfile, SaslScramSha256};
use fe2o3_amqp::session::SessionHandle;
use fe2o3_amqp::types::definitions::{self, ErrorCondition, SenderSettleMode};
use fe2o3_amqp::types::messaging::{
    Body, DistributionMode, FilterSet, Modified, Outcome, Source, Target, TerminusDurability, TerminusExpiryPolicy,
};
use fe2o3_amqp::types::primitives::{Array, Symbol, Value};
use fe2o3_amqp::{Connection, Receiver, Sendable, Sender, Session};
use serde_amqp::described::Described;
use serde_amqp::descriptor::Descriptor;
use serde_json::{json, Value as Fields};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::sync::{oneshot, Mutex};

const SELECTOR: u64 = 0x0000_468C_0000_0004;
const VERSION: &str = "0.18.4";

type Answer = Result<Fields, Box<dyn Error>>;

#[derive(Clone)]
enum End {
    Sender(Rc<Mutex<Option<Sender>>>),
    Receiver(Rc<Mutex<Option<Receiver>>>),
}

#[derive(Default)]
struct Client {
    name: String,
    session: Mutex<Option<SessionHandle<()>>>,
    closer: RefCell<Option<oneshot::Sender<oneshot::Sender<()>>>>,
    links: RefCell<HashMap<String, End>>,
    settled: RefCell<HashMap<String, bool>>,
    held: RefCell<HashMap<u64, DeliveryInfo>>,
    number: Cell<u64>,
}

fn say(line: Fields) {
    println!("{line}");
}

fn text<'a>(fields: &'a Fields, name: &str) -> &'a str {
    fields[name].as_str().unwrap_or_default()
}

fn flag(fields: &Fields, name: &str) -> bool {
    fields[name].as_bool().unwrap_or_default()
}

fn condition(condition: &ErrorCondition) -> String {
    serde_json::to_value(condition).ok().and_then(|fields| fields.as_str().map(str::to_owned)).unwrap_or_default()
}

fn reason(error: &definitions::Error) -> String {
    format!("{}: {}", condition(&error.condition), error.description.as_deref().unwrap_or_default())
}

impl Client {
    async fn connect(&self, command: &Fields) -> Answer {
        let profile = match text(command, "mechanism") {
            "NONE" => None,
            "SCRAM-SHA-256" => {
                let login = SaslScramSha256::new(text(command, "user"), text(command, "password"));
                Some(SaslProfile::ScramSha256(login))
            }
            _ if command["user"].is_string() => Some(SaslProfile::Plain {
                username: text(command, "user").to_owned(),
                password: text(command, "password").to_owned(),
            }),
            _ => Some(SaslProfile::Anonymous),
        };
        let mut builder = Connection::builder().container_id(text(command, "container"));
        if let Some(profile) = profile {
            builder = builder.sasl_profile(profile);
        }
        if let Some(ms) = command["idle_ms"].as_u64() {
            builder = builder.idle_time_out(ms as u32);
        }
        if let Some(bytes) = command["frame_bytes"].as_u64() {
            builder = builder.max_frame_size(bytes as u32);
        }
        let url = format!("amqp://{}:{}", text(command, "host"), command["port"]);
        let mut connection: ConnectionHandle<()> = builder.open(url.as_str()).await?;
        let session = Session::begin(&mut connection).await?;
        *self.session.lock().await = Some(session);
        let (closer, mut closing) = oneshot::channel::<oneshot::Sender<()>>();
        *self.closer.borrow_mut() = Some(closer);
        let name = self.name.clone();
        tokio::task::spawn_local(async move {
            tokio::select! {
                ended = connection.on_close() => {
                    say(json!({"client": name, "event": "closed", "reason": format!("{ended:?}")}));
                }
                Ok(done) = &mut closing => {
                    let _ = connection.close().await; // an error only repeats why the connection ended before
                    let _ = done.send(());
                }
            }
        });
        Ok(json!({}))
    }

    async fn attach(&self, command: &Fields) -> Answer {
        let link = text(command, "link");
        let address = command["address"].as_str().map(str::to_owned);
        let mut session = self.session.lock().await;
        let session = session.as_mut().ok_or("not connected")?;
        let mode = if flag(command, "settled") { SenderSettleMode::Settled } else { SenderSettleMode::Unsettled };
        let named = command["capabilities"].as_array().map(|names| {
            Array::from(names.iter().map(|one| Symbol::from(one.as_str().unwrap())).collect::<Vec<_>>())
        });
        self.settled.borrow_mut().insert(link.to_owned(), flag(command, "settled"));
        if text(command, "role") == "sender" {
            let dynamic = flag(command, "dynamic");
            let target = Target { address, dynamic, capabilities: named, ..Target::default() };
            let attached = Sender::builder().name(link).target(target).sender_settle_mode(mode).attach(session).await;
            let sender = attached.map_err(|error| match error {
                SenderAttachError::RemoteClosedWithError(error) => reason(&error),
                other => other.to_string(),
            })?;
            let address = sender.target().as_ref().and_then(|target| target.address.clone());
            self.links.borrow_mut().insert(link.to_owned(), End::Sender(Rc::new(Mutex::new(Some(sender)))));
            return Ok(json!({ "address": address }));
        }
        let mut source =
            Source { address, dynamic: flag(command, "dynamic"), capabilities: named, ..Source::default() };
        if flag(command, "durable") {
            source.durable = TerminusDurability::UnsettledState;
            source.expiry_policy = TerminusExpiryPolicy::Never;
        }
        if flag(command, "copy") {
            source.distribution_mode = Some(DistributionMode::Copy);
        }
        let mut filters = FilterSet::new();
        for pair in command["filters"].as_array().into_iter().flatten() {
            let name = Symbol::from(pair[0].as_str().unwrap());
            let selects = name.as_str().contains("selector");
            let descriptor = if selects { Descriptor::Code(SELECTOR) } else { Descriptor::Name(name.clone()) };
            let described = Described { descriptor, value: values::to_library(&pair[1]) };
            filters.insert(name, Value::Described(Box::new(described)));
        }
        source.filter = (!filters.is_empty()).then_some(filters);
        let credit = match command["credit"].as_u64() {
            Some(0) | None => CreditMode::Manual,
            Some(window) => CreditMode::Auto(window as u32),
        };
        let builder = Receiver::builder().name(link).source(source).credit_mode(credit).sender_settle_mode(mode);
        let attached = builder.auto_accept(false).attach(session).await;
        let end = attached.map_err(|error| match error {
            ReceiverAttachError::RemoteClosedWithError(error) => reason(&error),
            other => other.to_string(),
        })?;
        let remote = end.source().clone().unwrap_or_default();
        let applied: Vec<String> =
            remote.filter.iter().flat_map(|set| set.iter().map(|(name, _)| name.to_string())).collect();
        self.links.borrow_mut().insert(link.to_owned(), End::Receiver(Rc::new(Mutex::new(Some(end)))));
        Ok(json!({ "address": remote.address, "filters": applied }))
    }

    fn end(&self, command: &Fields) -> Result<End, Box<dyn Error>> {
        Ok(self.links.borrow().get(text(command, "link")).ok_or("no such link")?.clone())
    }

    async fn send(&self, command: &Fields) -> Answer {
        let End::Sender(sender) = self.end(command)? else { return Err("not a sender".into()) };
        let mut sender = sender.lock().await;
        let sender = sender.as_mut().ok_or("detached")?;
        let settled = self.settled.borrow()[text(command, "link")];
        let mut waiting = Vec::new();
        for fields in command["messages"].as_array().into_iter().flatten() {
            let message = Sendable::builder().message(values::to_message(fields)).settled(settled).build();
            waiting.push(sender.send_batchable(message).await?);
        }
        let mut outcomes = Vec::new();
        for one in waiting {
            let outcome = one.await?;
            if settled {
                continue;
            }
            outcomes.push(match outcome {
                Outcome::Accepted(_) => json!({"name": "accepted"}),
                Outcome::Released(_) => json!({"name": "released"}),
                Outcome::Modified(_) => json!({"name": "modified"}),
                Outcome::Rejected(rejected) => match rejected.error {
                    Some(error) => json!({
                        "name": "rejected",
                        "condition": condition(&error.condition),
                        "description": error.description,
                    }),
                    None => json!({"name": "rejected"}),
                },
            });
        }
        Ok(json!({ "outcomes": outcomes }))
    }

    async fn next(&self, end: &mut Receiver) -> Answer {
        let delivery = end.recv::<Body<Value>>().await?;
        let mut fields = values::from_message(delivery.message());
        self.number.set(self.number.get() + 1);
        fields["delivery"] = json!(self.number.get());
        self.held.borrow_mut().insert(self.number.get(), DeliveryInfo::from(&delivery));
        Ok(fields)
    }

    async fn receive(&self, command: &Fields) -> Answer {
        let End::Receiver(receiver) = self.end(command)? else { return Err("not a receiver".into()) };
        let mut receiver = receiver.lock().await;
        let end = receiver.as_mut().ok_or("detached")?;
        let until = tokio::time::Instant::now() + Duration::from_secs(command["seconds"].as_u64().unwrap());
        let mut messages = Vec::new();
        while messages.len() < command["count"].as_u64().unwrap() as usize {
            match tokio::time::timeout_at(until, self.next(end)).await {
                Ok(fields) => messages.push(fields?),
                Err(_) => break,
            }
        }
        Ok(json!({ "messages": messages }))
    }

    async fn settle(&self, command: &Fields) -> Answer {
        let End::Receiver(receiver) = self.end(command)? else { return Err("not a receiver".into()) };
        let receiver = receiver.lock().await;
        let end = receiver.as_ref().ok_or("detached")?;
        for number in command["deliveries"].as_array().into_iter().flatten() {
            let delivery = self.held.borrow_mut().remove(&number.as_u64().unwrap()).ok_or("no such delivery")?;
            match text(command, "outcome") {
                "accepted" => end.accept(delivery).await?,
                "released" => end.release(delivery).await?,
                "rejected" => {
                    let named = command["condition"].as_str().map(|name| {
                        let given = ErrorCondition::Custom(Symbol::from(name));
                        definitions::Error::new(given, Some("no".to_owned()), None)
                    });
                    end.reject(delivery, named).await?
                }
                _ => {
                    let modified = Modified {
                        delivery_failed: Some(flag(command, "failed")),
                        undeliverable_here: Some(flag(command, "undeliverable")),
                        message_annotations: None,
                    };
                    end.modify(delivery, modified).await?
                }
            }
        }
        Ok(json!({}))
    }

    async fn credit(&self, command: &Fields) -> Answer {
        let End::Receiver(receiver) = self.end(command)? else { return Err("not a receiver".into()) };
        let mut receiver = receiver.lock().await;
        let count = command["count"].as_u64().unwrap() as u32;
        receiver.as_mut().ok_or("detached")?.set_credit(count).await?;
        Ok(json!({}))
    }

    async fn drain(&self, command: &Fields) -> Answer {
        let End::Receiver(receiver) = self.end(command)? else { return Err("not a receiver".into()) };
        let mut receiver = receiver.lock().await;
        receiver.as_mut().ok_or("detached")?.drain().await?; // waits for the drain, which the library does not report
        Ok(json!({}))
    }

    async fn detach(&self, command: &Fields) -> Answer {
        let end = self.end(command)?;
        self.links.borrow_mut().remove(text(command, "link"));
        let close = flag(command, "close");
        match end {
            End::Sender(sender) => {
                let sender = sender.lock().await.take().ok_or("detached")?;
                if close {
                    sender.close().await?;
                } else {
                    sender.detach().await.map_err(|(_, error)| error)?;
                }
            }
            End::Receiver(receiver) => {
                let end = receiver.lock().await.take().ok_or("detached")?;
                if close {
                    end.close().await?;
                } else {
                    end.detach().await.map_err(|(_, error)| error)?;
                }
            }
        }
        Ok(json!({}))
    }

    async fn close(&self) -> Answer {
        let closer = self.closer.borrow_mut().take();
        if let Some(closer) = closer {
            let (done, closed) = oneshot::channel();
            if closer.send(done).is_ok() {
                let _ = closed.await; // the connection may have ended already
            }
        }
        self.links.borrow_mut().clear();
        *self.session.lock().await = None;
        Ok(json!({}))
    }

    async fn answer(&self, command: &Fields) {
        let answered = match text(command, "do") {
            "connect" => self.connect(command).await,
            "attach" => self.attach(command).await,
            "send" => self.send(command).await,
            "receive" => self.receive(command).await,
            "settle" => self.settle(command).await,
            "credit" => self.credit(command).await,
            "drain" => self.drain(command).await,
            "detach" => self.detach(command).await,
            _ => self.close().await,
        };
        say(match answered {
            Ok(result) => json!({"n": command["n"], "result": result}),
            Err(error) => json!({"n": command["n"], "error": error.to_string()}),
        });
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    say(json!({"event": "ready", "name": "fe2o3-amqp", "version": VERSION}));
    let here = tokio::task::LocalSet::new();
    here.run_until(async {
        let mut clients: HashMap<String, Rc<Client>> = HashMap::new();
        let mut lines = BufReader::new(tokio::io::stdin()).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            let command: Fields = serde_json::from_str(&line).unwrap();
            let name = text(&command, "client").to_owned();
            let client = clients
                .entry(name.clone())
                .or_insert_with(|| Rc::new(Client { name: name.clone(), ..Client::default() }))
                .clone();
            tokio::task::spawn_local(async move { client.answer(&command).await });
        }
    })
    .await;
}
